"""The environment: a problem, a tool to compute with, one answer."""

from __future__ import annotations

from agentrl_jax.protocol import Action, EnvironmentSpec, Message, Observation, Status, Task, ToolCall

from ..answering import Reply, answer
from ..json_state import JsonState
from .answers import EXPECTED, Unreadable, read
from .calculator import Refused, evaluate, write
from .python_tool import PythonTool
from .tasks import Options, is_close, values

HOW = {
    "calculator": "Compute with calculate, then give the result with answer; there is one try.",
    "python": "Compute with run_code (a program that prints), then give the result with answer; there is one try.",
}


class MathEnvironment(JsonState):
    """Everything follows from the task; the episode's seed changes nothing. Each computation stands alone, so the
    state is small: what was answered, and which of the reference's values have not been seen yet."""

    def __init__(self, spec: EnvironmentSpec, options: Options) -> None:
        self.spec = spec
        self._options = options
        self._python = PythonTool(options.backend)

    def reset(self, task: Task, seed: int) -> Observation:
        self.close()
        self._state = {
            "task": task.id,
            "form": task.data["form"],
            "wanted": values(task.data["steps"]),
            "calls": 0,
            "answer": None,
        }
        how = f"{HOW[self._options.tool]} The answer is {EXPECTED[task.data['form']]}."
        return Observation(content=(Message(role="user", content=f"{task.data['text']}\n{how}"),))

    def step(self, action: Action) -> Observation:
        state = self._open()
        return answer(action, self.spec.tools, self._execute, lambda: state["answer"] is not None)

    def _execute(self, call: ToolCall) -> Reply:
        state = self._open()
        if call.name == "answer":
            value = str(call.arguments["value"])
            try:
                read(state["form"], value)
            except Unreadable as error:
                return Reply(f"not an answer: {error}", Status.INVALID_ACTION)
            state["answer"] = value
            return Reply("answered", terminated=True)
        state["calls"] += 1
        if call.name == "run_code":
            return self._seen(self._python.run(str(call.arguments["code"])))
        try:
            return self._seen(Reply(write(evaluate(str(call.arguments["expression"])))))
        except Refused as error:
            return Reply(f"error: {error}", Status.DENIED, gain=0.0)

    def _seen(self, reply: Reply) -> Reply:
        """The reply with what it brought: 1 for a value of the reference solution that had not been seen yet."""
        wanted = self._open()["wanted"]
        lines = reply.text.strip().rsplit("\n", 1)
        found = is_close(lines[-1].partition(" (about")[0], wanted)
        if found is not None:
            wanted.remove(found)
        return reply._replace(gain=float(found is not None))

    def close(self) -> None:
        super().close()
        self._python.close()
