"""``GET /v1/slots/{slot}/image``: how the slot's image configures its programs."""

from __future__ import annotations

from aiohttp import web

from agentenv.errors import ConfigError
from agentenv.sandbox.server.bodies import slot_key
from agentenv.sandbox.server.container import Container, requester_of
from agentenv.wire.image_config import ImageConfig


class ImageRoute:
    """The route, over one container."""

    def __init__(self, container: Container) -> None:
        self._container = container

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Register it."""
        router.add_get("/v1/slots/{slot}/image", self._get, allow_head=False)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        view = requester_of(request, self._container).view(slot_key(request))
        if view is None:
            raise ConfigError("image", "the slot has none", next_step="lease one with an image")
        config = ImageConfig(
            user=view.user,
            workdir=view.workdir or "/",
            env=view.env,
            entrypoint=tuple(view.entrypoint),
            cmd=tuple(view.cmd),
        )
        return web.json_response(text=config.model_dump_json())
