"""The control plane: E2B's API of sandboxes, templates and snapshots."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import unquote

from aiohttp import web

from agentenv.e2b.builds import Builds
from agentenv.e2b.envd import PORT
from agentenv.e2b.proxy import SANDBOX_HEADER, Proxy
from agentenv.e2b.replies import (
    VOLUMES,
    RefusalError,
    body_of,
    moment,
    page,
    refusal,
    sandbox_and_port,
    unix_s,
    wanted_metadata,
    words,
)
from agentenv.e2b.sandboxes import Held, Sandboxes, Tenant, seconds
from agentenv.e2b.templates import Template, TemplateBook
from agentenv.errors import AgentEnvError

Handler = Callable[[web.Request, Tenant], Awaitable[web.StreamResponse]]
Tenants = Callable[[str], Awaitable[Tenant]]
"""Who sends a request, by the token in it. Raises UnauthorizedError."""

_LOGS: Final = "logs of sandboxes: read a command's output where it is run"
_REFUSED: Final = {
    "/volumes": VOLUMES,
    "/secrets": "secrets of E2B: give a sandbox what it needs as envs",
    "/sandboxes/{id}/logs": _LOGS,
    "/v2/sandboxes/{id}/logs": _LOGS,
}


class Routes:
    """The API. ``of_slots``: what slots have whose template does not say."""

    def __init__(
        self,
        tenants: Tenants,
        sandboxes: Sandboxes,
        templates: TemplateBook,
        builds: Builds,
        envd_version: str,
        of_slots: dict[str, int],
    ) -> None:
        self._tenants = tenants
        self._sandboxes = sandboxes
        self._templates = templates
        self._builds = builds
        self._envd_version = envd_version
        self._of_slots = of_slots
        self._proxy = Proxy(sandboxes)

    def application(self) -> web.Application:
        """It, as an application. Whatever names a sandbox, or is not one of its paths, is passed on."""
        application = web.Application(client_max_size=16 * 2**20)
        add, one, template = application.router.add_route, "/sandboxes/{id}", "/templates/{id}"
        table: list[tuple[str, str, Handler]] = [
            ("POST", "/sandboxes", self._create),
            ("POST", "/v2/sandboxes", self._create),
            ("GET", "/sandboxes", self._list),
            ("GET", "/v2/sandboxes", self._list),
            ("GET", "/sandboxes/metrics", self._all_metrics),
            ("GET", one, self._get),
            ("DELETE", one, self._kill),
            ("POST", f"{one}/timeout", self._timeout),
            ("POST", f"{one}/refreshes", self._refresh),
            ("POST", f"{one}/pause", self._pause),
            ("POST", f"{one}/resume", self._connect),
            ("POST", f"{one}/connect", self._connect),
            ("POST", f"/v2{one}/connect", self._connect),
            ("PUT", f"{one}/network", self._network),
            ("GET", f"{one}/metrics", self._metrics),
            ("POST", f"{one}/snapshots", self._snapshot),
            ("POST", f"{one}/fork", self._fork),
            ("GET", "/snapshots", self._snapshots),
            ("GET", "/templates", self._list_templates),
            ("GET", "/v2/templates", self._list_templates),
            ("POST", "/v3/templates", self._new_template),
            ("POST", "/templates/tags", self._tag),
            ("DELETE", "/templates/tags", self._untag),
            ("GET", "/templates/aliases/{id}", self._alias),
            ("GET", template, self._get_template),
            ("DELETE", template, self._delete_template),
            ("GET", f"{template}/tags", self._tags),
            ("GET", f"{template}/files/{{hash}}", self._upload_link),
            ("POST", f"/v2{template}/builds/{{build}}", self._start_build),
            ("GET", f"{template}/builds/{{build}}/status", self._build_status),
        ]
        for method, path, handler in table:
            add(method, path, self._checked(handler))
        for path, what in _REFUSED.items():
            add("*", path, self._checked(_without(what)))
            add("*", path + "/{rest:.*}", self._checked(_without(what)))
        add("PUT", "/e2b-upload/{secret}", self._upload)
        add("GET", "/health", self._health)
        add("*", "/{rest:.*}", self._passed)
        return application

    def _checked(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A server in a sandbox may have the same path: what names a sandbox is passed on."""

        async def handle(request: web.Request) -> web.StreamResponse:
            if _names_a_sandbox(request):
                return await self._passed(request)
            try:
                tenant = await self._tenants(_token(request))
                return await handler(request, tenant)
            except (RefusalError, AgentEnvError, KeyError, ValueError, TypeError) as error:
                return refusal(error)

        return handle

    async def _passed(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._proxy.handle(request)
        except (RefusalError, AgentEnvError) as error:
            return refusal(error)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return await self._passed(request) if _names_a_sandbox(request) else web.Response(status=204)

    # -- sandboxes -------------------------------------------------------------------------------------

    def _held(self, request: web.Request, tenant: Tenant) -> Held:
        return self._sandboxes.get(tenant.run, request.match_info["id"])

    def _told(self, held: Held) -> dict[str, Any]:
        return held.told(self._envd_version, **self._of_slots)

    async def _create(self, request: web.Request, tenant: Tenant) -> web.Response:
        held = await self._sandboxes.create(tenant, await body_of(request))
        return web.json_response(self._told(held), status=201)

    async def _list(self, request: web.Request, tenant: Tenant) -> web.Response:
        query = request.query
        states = words(query.getall("state", [])) or ["running", "paused"]
        metadata = wanted_metadata(query.get("metadata", ""))
        found = [
            held
            for held in self._sandboxes.of(tenant.run)
            if held.state in states and metadata.items() <= held.metadata.items()
        ]
        if named := query.get("template"):
            found = [held for held in found if held.template == named]
        if after := query.get("startedAfter"):
            found = [held for held in found if held.started_unix_s > unix_s(after)]
        if before := query.get("startedBefore"):
            found = [held for held in found if held.started_unix_s < unix_s(before)]
        found.sort(key=lambda held: held.started_unix_s, reverse=query.get("order", "desc") == "desc")
        return page(found, query, self._told)

    async def _get(self, request: web.Request, tenant: Tenant) -> web.Response:
        return web.json_response(self._told(self._held(request, tenant)))

    async def _kill(self, request: web.Request, tenant: Tenant) -> web.Response:
        await self._sandboxes.end(self._held(request, tenant))
        return web.Response(status=204)

    async def _timeout(self, request: web.Request, tenant: Tenant) -> web.Response:
        held = self._held(request, tenant)
        held.ends_in(seconds((await body_of(request))["timeout"]))
        return web.Response(status=204)

    async def _refresh(self, request: web.Request, tenant: Tenant) -> web.Response:
        held = self._held(request, tenant)
        held.ends_in(seconds((await body_of(request)).get("duration", 15)), at_least=True)
        return web.Response(status=204)

    async def _pause(self, request: web.Request, tenant: Tenant) -> web.Response:
        held = self._held(request, tenant)
        await self._sandboxes.pause(held)
        # E2B answers 204 too. Files are kept, processes are not: so its pauseMode is "filesystem" from now on.
        return web.Response(status=204, headers={"X-Agentenv-Kept": "files; processes ended"})

    async def _connect(self, request: web.Request, tenant: Tenant) -> web.Response:
        held, asked = self._held(request, tenant), await body_of(request)
        timeout_s = seconds(asked.get("timeout", 300))
        began = held.state == "paused"
        held.ends_in(timeout_s, at_least=not began)
        await self._sandboxes.resume(held)
        if began:
            held.ends_in(timeout_s)
        return web.json_response(self._told(held), status=201 if began else 200)

    async def _network(self, request: web.Request, tenant: Tenant) -> web.Response:
        await self._sandboxes.set_network(self._held(request, tenant), await body_of(request))
        return web.Response(status=204)

    async def _snapshot(self, request: web.Request, tenant: Tenant) -> web.Response:
        held, asked = self._held(request, tenant), await body_of(request)
        name = await self._sandboxes.snapshot(held, asked.get("name"))
        return web.json_response({"snapshotID": name, "names": [name]}, status=201)

    async def _snapshots(self, request: web.Request, tenant: Tenant) -> web.Response:
        query = request.query
        found = [
            template
            for template in self._templates.snapshots(tenant.run)
            if query.get("sandboxID", template.snapshot_of) == template.snapshot_of
            and query.get("name", template.name) == template.name
        ]
        return page(found, query, lambda template: {"snapshotID": template.name, "names": [template.name]})

    async def _fork(self, request: web.Request, tenant: Tenant) -> web.Response:
        held, asked = self._held(request, tenant), await body_of(request)
        count = asked.get("count", 1)
        if not isinstance(count, int) or not 1 <= count <= 100:
            raise RefusalError(400, f"count: got {count!r}; allowed are 1 to 100")
        forks = await self._sandboxes.fork(held, count, seconds(asked.get("timeout", 300)))
        return web.json_response([{"sandbox": self._told(fork)} for fork in forks], status=201)

    # -- metrics ---------------------------------------------------------------------------------------

    async def _metrics(self, request: web.Request, tenant: Tenant) -> web.Response:
        held = self._held(request, tenant)
        start, end = (unix_s(request.query.get(name, default)) for name, default in (("start", "0"), ("end", "9" * 12)))
        found = await self._measured(held)
        return web.json_response([one for one in found if start - 1 <= one["timestampUnix"] <= end + 1])

    async def _all_metrics(self, request: web.Request, tenant: Tenant) -> web.Response:
        ids = words(request.query.getall("sandbox_ids", []))
        found = {each: await self._measured(self._sandboxes.get(tenant.run, each)) for each in ids}
        return web.json_response({"sandboxes": {each: one[-1] for each, one in found.items() if one}})

    async def _measured(self, held: Held) -> list[dict[str, Any]]:
        """One measurement, of now; none while it is paused. Memory and disk are the slot's, CPU is the machine's."""
        if held.box is None:
            return []
        used = await held.box.metrics()
        headers = {"X-Access-Token": held.token} if held.token is not None else {}
        async with self._sandboxes.http.get(await held.url(PORT) + "/metrics", headers=headers) as reply:
            told = await reply.json(content_type=None)
        return [
            {
                "timestamp": moment(told["ts"]),
                "timestampUnix": told["ts"],
                "cpuCount": told["cpu_count"],
                "cpuUsedPct": told["cpu_used_pct"],
                "memUsed": told["mem_used"] if used.memory_bytes is None else used.memory_bytes,
                "memTotal": used.memory_limit_bytes or told["mem_total"],
                "memCache": told.get("mem_cache", 0),
                "diskUsed": told["disk_used"] if used.storage_bytes is None else used.storage_bytes,
                "diskTotal": used.storage_limit_bytes or told["disk_total"],
            }
        ]

    # -- templates -------------------------------------------------------------------------------------

    def _template(self, template: Template) -> dict[str, Any]:
        versions = sorted(template.tags.values(), key=lambda version: version.created_unix_s)
        last = versions[-1]
        return {
            "templateID": template.name,
            "buildID": last.build,
            "cpuCount": round(last.cpus or self._of_slots["cpus"]) or 1,
            "memoryMB": last.memory_mib or self._of_slots["memory_mib"],
            "diskSizeMB": self._of_slots["disk_mib"],
            "public": not template.run,
            "aliases": [template.name],
            "names": [template.name],
            "createdAt": moment(versions[0].created_unix_s),
            "updatedAt": moment(last.created_unix_s),
            "createdBy": None,
            "lastSpawnedAt": None,
            "spawnCount": 0,
            "buildCount": len({version.build for version in versions}),
            "envdVersion": self._envd_version,
            "buildStatus": "ready",
        }

    async def _list_templates(self, request: web.Request, tenant: Tenant) -> web.Response:
        return page([one for one in self._templates.of(tenant.run) if one.tags], request.query, self._template)

    def _named(self, request: web.Request, tenant: Tenant) -> Template:
        name = unquote(request.match_info["id"])
        template = self._templates.find(tenant.run, name.partition(":")[0])
        if template is None or not template.tags:
            raise RefusalError(404, f"template '{name}' not found")
        return template

    async def _get_template(self, request: web.Request, tenant: Tenant) -> web.Response:
        return web.json_response({**self._template(self._named(request, tenant)), "builds": []})

    async def _alias(self, request: web.Request, tenant: Tenant) -> web.Response:
        template = self._named(request, tenant)
        return web.json_response({"templateID": template.name, "public": not template.run})

    async def _delete_template(self, request: web.Request, tenant: Tenant) -> web.Response:
        await self._templates.remove(tenant.run, unquote(request.match_info["id"]))
        return web.Response(status=204)

    async def _tags(self, request: web.Request, tenant: Tenant) -> web.Response:
        template = self._named(request, tenant)
        found = [
            {"tag": tag, "buildID": version.build, "createdAt": moment(version.created_unix_s)}
            for tag, version in template.tags.items()
        ]
        return web.json_response(found)

    async def _tag(self, request: web.Request, tenant: Tenant) -> web.Response:
        asked = await body_of(request)
        template, version = self._templates.version(tenant.run, asked["target"])
        self._templates.own(tenant.run, template.name)
        await self._templates.add(tenant.run, template.name, asked["tags"], version)
        return web.json_response({"tags": asked["tags"], "buildID": version.build}, status=201)

    async def _untag(self, request: web.Request, tenant: Tenant) -> web.Response:
        asked = await body_of(request)
        await self._templates.untag(tenant.run, asked["name"], asked["tags"])
        return web.Response(status=204)

    async def _new_template(self, request: web.Request, tenant: Tenant) -> web.Response:
        build = self._builds.new(tenant.run, await body_of(request))
        told = {"templateID": build.name, "buildID": build.id, "public": False, "tags": build.tags}
        return web.json_response({**told, "names": [build.name], "aliases": [build.name]}, status=202)

    async def _upload_link(self, request: web.Request, tenant: Tenant) -> web.Response:
        present, secret = self._builds.uploads.link(tenant.run, request.match_info["hash"])
        told = {"present": present, "url": f"{request.scheme}://{request.host}/e2b-upload/{secret}"}
        return web.json_response(told, status=201)

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        try:
            await self._builds.uploads.put(request.match_info["secret"], request)
        except RefusalError as error:
            return refusal(error)
        return web.Response()

    async def _start_build(self, request: web.Request, tenant: Tenant) -> web.Response:
        build = self._builds.get(tenant.run, request.match_info["build"])
        self._builds.start(tenant, build, await body_of(request))
        return web.Response(status=202)

    async def _build_status(self, request: web.Request, tenant: Tenant) -> web.Response:
        return web.json_response(self._builds.get(tenant.run, request.match_info["build"]).told())


def _names_a_sandbox(request: web.Request) -> bool:
    return SANDBOX_HEADER in request.headers or sandbox_and_port(request.host) is not None


def _token(request: web.Request) -> str:
    """The farm's token: E2B's API key, or the access token of its command line."""
    key = request.headers.get("X-API-Key", "")
    return key or request.headers.get("Authorization", "").removeprefix("Bearer ")


def _without(what: str) -> Handler:
    async def refuse(_: web.Request, __: Tenant) -> web.StreamResponse:
        raise RefusalError(501, f"this farm has no {what}")

    return refuse
