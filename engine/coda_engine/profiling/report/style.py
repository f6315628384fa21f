"""The page's style sheet, for light and dark surroundings."""

STYLE = """
:root { --ink: #1c2330; --soft: #5c6675; --paper: #fff; --rule: #dfe3ea; --good: #1a7f4b; --bad: #b3261e; }
.s0 { --c: #2563c9 } .s1 { --c: #c2570c } .s2 { --c: #0f8a6a }
.s3 { --c: #a12c8f } .s4 { --c: #8a6d00 } .s5 { --c: #5b5bd6 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #9aa4b2; --paper: #14171c; --rule: #2c323b; --good: #4cc38a; --bad: #ff8b80; }
  .s0 { --c: #7aa7ff } .s1 { --c: #ffab70 } .s2 { --c: #56d3ae }
  .s3 { --c: #e58bd6 } .s4 { --c: #e0c04c } .s5 { --c: #a5a5ff }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 820px; padding: 32px 20px 64px; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px } h2 { font-size: 17px; margin: 36px 0 4px }
p { margin: 4px 0 } .soft { color: var(--soft) } .good { color: var(--good) } .bad { color: var(--bad) }
table { border-collapse: collapse; width: 100%; margin: 10px 0; font-size: 13.5px; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top }
th { font-weight: 600; color: var(--soft) } td.n, th.n { text-align: right }
td.key { overflow-wrap: anywhere } .scroll { overflow-x: auto }
svg { width: 100%; height: auto; display: block; margin-top: 6px }
.grid { stroke: var(--rule); stroke-width: 1 }
.tick, .label { fill: var(--soft); font-size: 11px } .label { font-size: 12px }
.line { fill: none; stroke: var(--c); stroke-width: 1.8 } .dashed { stroke-dasharray: 5 5 }
.band { fill: var(--c); opacity: .1 } .reach { stroke: var(--c); stroke-width: 1.4 }
.point { fill: var(--c) } .hollow { fill: var(--paper); stroke: var(--c); stroke-width: 2 }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; color: var(--soft) }
.legend span::before { content: ""; display: inline-block; width: 10px; height: 10px; border-radius: 5px;
  background: var(--c); margin-right: 6px }
"""
