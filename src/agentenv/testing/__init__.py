"""Fakes and the scripted policy, for anyone's tests."""
