"""Clients of model servers, and the rendering of conversations by chat templates."""
