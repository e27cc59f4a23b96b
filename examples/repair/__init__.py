"""Repair: an environment whose tasks are bugs injected into real packages, judged by their own tests."""
