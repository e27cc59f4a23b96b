"""Clients of model servers, and rendering of conversations by chat templates."""
