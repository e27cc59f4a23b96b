"""Builds an image from a Dockerfile without Docker: parser, build context, plan and driver.

Text becomes instructions (``parser``), instructions and the configurations of the base images become steps (``plan``),
and ``build`` performs the steps on machines (``machine``) that the caller provides. Only ``context`` reads the file
system. The reference for every corner case is BuildKit's Dockerfile frontend (github.com/moby/buildkit,
``frontend/dockerfile`` and its copying, tonistiigi/fsutil ``copy``); where this package differs on purpose, the
docstring of the place says so.
"""
