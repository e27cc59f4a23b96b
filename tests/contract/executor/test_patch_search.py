"""patch and search over the whole path: the same answers on every backend."""

from __future__ import annotations

import pytest

from agentenv.errors import InvalidArgumentsError, PolicyRefusalError
from agentenv.executor.session import ToolSession
from agentenv.sdk.tool_context import ToolContext
from agentenv.wire.tools import PatchReply, SearchReply

pytestmark = pytest.mark.asyncio(loop_scope="module")

DIFF = """diff --git a/src/a.py b/src/a.py
--- a/src/a.py
+++ b/src/a.py
@@ -1,3 +1,4 @@
 import os
-x = 1
+x = 2
+y = 3
 print(x)
diff --git a/new.sh b/new.sh
new file mode 100755
--- /dev/null
+++ b/new.sh
@@ -0,0 +1 @@
+echo new
"""

NEW = DIFF[DIFF.index("diff --git a/new.sh") :]


async def seeded(session: ToolSession) -> ToolContext:
    context = ToolContext(session)
    await context.write_file("src/a.py", "import os\nx = 1\nprint(x)\n")
    await context.write_file("src/b.bin", b"x = 1\0")
    return context


async def test_a_patch_is_all_or_nothing(session: ToolSession) -> None:
    context = await seeded(session)
    reply = await context.patch(DIFF)
    assert [(file.path, file.action, file.hunks) for file in reply.files] == [
        ("src/a.py", "modified", 1),
        ("new.sh", "created", 1),
    ]
    assert await context.read_file("src/a.py") == "import os\nx = 2\ny = 3\nprint(x)\n"
    assert (await context.terminal("./new.sh")).stdout == "new\n"
    before = (await context.terminal("find . -type f | sort | xargs sha256sum")).stdout
    with pytest.raises(InvalidArgumentsError, match=r"src/a.py: hunk 1 of 1 .*already applied"):
        await context.patch(DIFF.replace("new.sh", "other.sh"))
    with pytest.raises((OSError, PolicyRefusalError), match=r"new\.sh"):  # refused, or a read-only root
        await context.patch(NEW.replace("b/new.sh", "b/../../new.sh"))
    assert (await context.terminal("find . -type f | sort | xargs sha256sum")).stdout == before


async def test_a_model_reads_why_a_patch_does_not_fit(session: ToolSession) -> None:
    await seeded(session)
    result = await session.call("patch", {"patch": DIFF.replace("-x = 1", "-x = 7")})
    assert (result.fault, result.exit_code) == ("none", 1)
    assert "closest place is line 1, where 2 of its 3 old lines match" in result.stderr
    assert "     2 ! x = 1\n       ? x = 7   <- what the patch expects" in result.stderr
    result = await session.call("patch", {"patch": "change x to 2"})
    assert (result.fault, result.error) == ("model", "invalid_arguments")
    assert "no file names" in result.message


async def test_search_finds_lines_and_counts_what_it_skips(session: ToolSession) -> None:
    context = await seeded(session)
    reply = await context.search(r"^x\s*=\s*\d+$")
    assert [(match.path, match.line, match.text) for match in reply.matches] == [("src/a.py", 2, "x = 1")]
    assert (reply.binary_skipped, reply.truncated) == (1, False)
    assert (await context.search("X = 1", "src", ignore_case=True, literal=True)).matches == reply.matches
    assert (await context.search("x", limit=1)).truncated
    with pytest.raises(InvalidArgumentsError, match="look-around"):
        await context.search("(?=x)")
    with pytest.raises(FileNotFoundError):
        await context.search("x", "missing")


async def test_replies_are_what_the_wire_says(session: ToolSession) -> None:
    await seeded(session)
    found = await session.call("search", {"pattern": "print"})
    assert SearchReply.model_validate(found.content).files_searched == 1
    done = await session.call("patch", {"patch": DIFF, "fuzz": 0})
    assert len(PatchReply.model_validate(done.content).files) == 2


async def test_a_verifier_sees_patched_files_after_a_seal(session: ToolSession) -> None:
    context = await seeded(session)
    await context.patch(DIFF)
    await session.seal()
    assert (await context.search("y = 3")).matches[0].path == "src/a.py"
