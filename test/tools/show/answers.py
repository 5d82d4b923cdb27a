"""Made-up answers for the tests of `qspec show`."""

from __future__ import annotations

from test.tools.show.upstream import Pass, Script

EVIL = '</script><script>document.title = "run"</script><img src=x onerror="document.title=1">'
SKY = Script(
    "The",
    [
        Pass(
            [(" sky", "queue"), (" is", "queue"), (" blue", "target")],
            [(" red", "prompt", 0.31), (" wine", "prompt", 0.07)],
            match="Why is",
        ),
        Pass([(",", "target")]),
        Pass(
            [(" very", "step"), (" blue", "output"), (".", "guess"), ("\n", "target")],
            match="is blue",
        ),
        Pass([("", "target")]),
    ],
)
HTML = Script(
    "<b>", [Pass([(EVIL, "queue"), ("&amp;\u2028$&", "target")], [(EVIL, "step", 0.5)], match=EVIL)]
)


def long(tokens: int) -> Script:
    """An answer of 1 + `tokens` tokens, four to a pass, in pieces with only their new tokens."""
    four = [(" a", "queue"), (" b", "step"), (" c", "prompt"), (" d", "target")]
    return Script(
        "x", [Pass(four, [(" z", "output", 0.2)], match="c d")] * (tokens // 4), incremental=True
    )
