"""The Python tool: each call is a program of its own, run in a sandbox with an empty workspace."""

from __future__ import annotations

from typing import Any

from agentrl_jax.protocol import Status

from ..answering import Reply

TIME_S = 10.0
MEMORY_BYTES = 512 << 20
OUTPUT_BYTES = 16_000


class PythonTool:
    """A box that is opened with the first program and emptied after each, so that calls share nothing."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._box: Any = None

    def run(self, code: str) -> Reply:
        from .. import sandbox

        try:
            box = self._open()
            box.write("program.py", code.encode("utf-8", "replace"))
            result = box.run([sandbox.interpreter()[0], "program.py"], timeout_s=TIME_S, env={"PYTHONHASHSEED": "0"})
            if result.ended:
                self.close()
            else:
                self._box.extract(sandbox.pack({}))
        except sandbox.SandboxError as error:
            self.close()
            return Reply(f"error: the sandbox broke ({error})"[:300], Status.ERROR, service="sandbox")
        said = result.stdout.decode(errors="replace")
        if result.limit is not None:
            said = result.stdout[: OUTPUT_BYTES // 2].decode(errors="replace")  # the rest differs from run to run
            return Reply(
                f"{said}\nstopped: over the limit on {result.limit}".strip(),
                Status.TIMEOUT if result.timed_out else Status.DENIED,
            )
        wrong = result.stderr.decode(errors="replace").strip()
        if not result.ok:
            return Reply(f"{said}\n{wrong[-1500:]}".strip() or f"exit code {result.exit_code}", Status.DENIED)
        return Reply(said.rstrip("\n") or "nothing was printed")

    def close(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            box.close()

    def _open(self) -> Any:
        from .. import sandbox

        if self._box is None:
            limits = sandbox.Limits(
                time_s=TIME_S, memory_bytes=MEMORY_BYTES, processes=16, disk_bytes=16 << 20, output_bytes=OUTPUT_BYTES
            )
            visible = sandbox.interpreter()[1]
            self._box = sandbox.open_sandbox({}, limits=limits, backend=self._backend, visible=visible)
        return self._box
