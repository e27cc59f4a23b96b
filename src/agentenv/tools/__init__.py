"""Descriptions and schemas of the tools."""
