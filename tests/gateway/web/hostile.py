"""Hostile texts: what a model, a client or a name of a file may hold to make a page run code or ask another server."""

from typing import Final

FOREIGN: Final = "http://evil.example:9"

VECTORS: Final = (
    "<script>window.hacked=1</script>",
    f'<img src="{FOREIGN}/a.png" onerror="window.hacked=1">',
    '<svg onload="window.hacked=1"><animate onbegin="window.hacked=1"/></svg>',
    '<iframe srcdoc="<script>parent.hacked=1</script>"></iframe>',
    f'<link rel="stylesheet" href="{FOREIGN}/a.css"><style>@import "{FOREIGN}/b.css";</style>',
    f'<base href="{FOREIGN}/"><meta http-equiv="refresh" content="0;url={FOREIGN}">',
    "[a](javascript:window.hacked=1) [b](JAVASCRIPT:window.hacked=1) [c](java\tscript:window.hacked=1)",
    "[a](data:text/html;base64,PHNjcmlwdD4=) [b](vbscript:x) [c](file:///etc/passwd) [d](blob:x)",
    "[a](&#106;avascript:window.hacked=1) <javascript:window.hacked=1>",
    f'![x]({FOREIGN}/pixel.png) ![x]({FOREIGN}/"onload="window.hacked=1)',
    f'[x][1] ![y][1]\n\n[1]: {FOREIGN}/ref "\'><img src=x onerror=window.hacked=1>"',
    "$\\href{javascript:window.hacked=1}{x}$ $\\url{javascript:window.hacked=1}$",
    f"$\\includegraphics{{{FOREIGN}/a.png}}$ $\\htmlStyle{{background:url({FOREIGN})}}{{x}}$",
    "$\\htmlData{onclick=window.hacked=1}{x}$ $$\\def\\a{\\a\\a}\\a$$ $\\class{x}{<script>window.hacked=1</script>}$",
    '```html\n<script>window.hacked=1</script>\n```\n```"><img/src/onerror=window.hacked=1>\nx\n```',
    "|<img src=x onerror=window.hacked=1>|\n|-|\n|<script>window.hacked=1</script>|",
    "{{constructor.constructor('window.hacked=1')()}} ${window.hacked=1} <%= window.hacked=1 %>",
    "<form action='javascript:window.hacked=1'><button autofocus onfocus=window.hacked=1>x</button></form>\u202e\u0000",
)
