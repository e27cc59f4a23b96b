"""What pyproject.toml cannot say: a wheel carries the slots' static programs, compiled where it is built.

So whoever installs it needs no compiler, and no right to write where it is installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "src"))

from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.slotagent.build import build_release


class BuildWithPrograms(build_py):
    """Compiles them into the build; without a compiler they are built on first use, as in a checkout."""

    def run(self) -> None:
        """Build the package."""
        super().run()
        if self.editable_mode:
            return
        try:
            build_release(Path(self.build_lib) / "agentenv/sandbox/slotagent/bin")
        except SandboxUnavailableError as error:
            self.warn(f"a wheel without the slots' programs: {error}")


class PlatformWheel(bdist_wheel):
    """For any Python 3, and this kind of machine."""

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI, platform."""
        return ("py3", "none", super().get_tag()[2])


class ForThisMachine(Distribution):
    """Not only Python, though no extension modules are in it."""

    def has_ext_modules(self) -> bool:
        """Whether it depends on the machine."""
        return True


setup(distclass=ForThisMachine, cmdclass={"build_py": BuildWithPrograms, "bdist_wheel": PlatformWheel})
