"""The page's style: light, dark where the reader asks for it, one column on a phone, and paper."""

LIGHT = """
--page:#ffffff;--ink:#2b2f36;--quiet:#656b75;--line:#c9cdd3;--soft:#f3f5f7;--warn:#fff4d6;--accent:#1f5fa8;
--c0:#2f6db3;--c1:#d9541e;--c2:#1a936f;--c3:#8b5fbf;--c4:#c43d6b;--c5:#7a6a1f;--c6:#3b3f46;--c7:#17a2b8;
--s0:#dfe9f5;--s1:#fbe7d6;--s2:#dcefe6;--s3:#ece3f4;--s4:#f6e3e6;--s5:#eeeadb;
"""
DARK = """
--page:#14171b;--ink:#e4e7eb;--quiet:#9aa1ab;--line:#3d434b;--soft:#1d2127;--warn:#3a3016;--accent:#7db4f0;
--c0:#6aa8ee;--c1:#ff8a57;--c2:#4cc9a0;--c3:#bd97ee;--c4:#f07aa2;--c5:#c9b65a;--c6:#b9bfc7;--c7:#4fd0e3;
--s0:#23364c;--s1:#4a3220;--s2:#1f4034;--s3:#392c4c;--s4:#48292f;--s5:#3c3823;
"""
STYLE = (
    f":root{{color-scheme:light dark;{LIGHT}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{DARK}}}}}"
    """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;padding:1.2rem 1.2rem 3rem;max-width:64rem;background:var(--page);color:var(--ink);
  font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25;margin:.2rem 0 .4rem}
h2{font-size:1.2rem;margin:2.2rem 0 .6rem;padding-bottom:.2rem;border-bottom:1px solid var(--line)}
h3{font-size:1rem;margin:1.4rem 0 .4rem}
a{color:var(--accent)}
nav{display:flex;flex-wrap:wrap;gap:.2rem 1rem;margin:.8rem 0}
.note,figcaption,.caption{color:var(--quiet);font-size:.85rem}
.warnings{background:var(--warn);padding:.6rem .8rem .6rem 1.8rem;border-radius:.4rem;margin:.8rem 0}
figure{margin:.6rem 0 1rem}
figure svg{display:block;width:100%;height:auto;stroke-linejoin:round}
figure svg text{font-family:inherit!important}
.narrow{display:none}
.scroll{overflow-x:auto;margin:.6rem 0}
table{border-collapse:collapse;font-size:.85rem;min-width:100%;overflow-wrap:normal}
.caption{margin:.8rem 0 -.3rem}
th,td{text-align:left;vertical-align:top;padding:.25rem .7rem .25rem 0;border-bottom:1px solid var(--line)}
th{font-weight:600}
td{max-width:24rem;overflow-wrap:break-word}
.roomy{min-width:9rem}
th.n,td.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
th.n+th:not(.n),td.n+td:not(.n){padding-left:.5rem}
tbody tr:hover{background:var(--soft)}
code{overflow-wrap:anywhere;font-size:.95em;background:var(--soft);padding:0 .25em;border-radius:.2em}
.runs{color:var(--quiet)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.1rem 1.2rem;padding:0;margin:.4rem 0;font-size:.85rem}
.legend li{max-width:100%}
.sample{display:inline-block;vertical-align:middle}
td:has(.sample){white-space:nowrap}
.shade{display:inline-block;width:1.6em;height:.9em;vertical-align:-.1em;border:1px solid var(--line)}
details{margin:.6rem 0}
summary{cursor:pointer;padding:.3rem 0}
@media (max-width:640px){
  body{padding:.8rem .8rem 2rem}
  .wide{display:none}
  .narrow{display:block}
  .cards,.cards tbody,.cards tr{display:block}
  .cards thead{display:none}
  .cards tr{padding:.4rem 0;border-bottom:1px solid var(--line)}
  .cards td,.cards td.n{display:flex;justify-content:space-between;gap:1rem;max-width:none;padding:.1rem 0;border:0;
    white-space:normal;text-align:right}
  .cards td:not([data-label]){justify-content:flex-start;font-weight:600}
  .cards td::before{content:attr(data-label);color:var(--quiet);text-align:left;flex:none;max-width:50%}
  .cards td:empty{display:none}
}
@page{margin:14mm}
@media print{
  body{max-width:none;padding:0;font-size:10.5pt}
  nav{display:none}
  .wide{display:block}
  .narrow{display:none}
  .scroll{overflow:visible}
  table{font-size:7.5pt}
  td{overflow-wrap:anywhere}
  td.n{overflow-wrap:normal}
  th.n{white-space:normal}
  .roomy{min-width:0}
  td,th{padding-right:.4rem}
  figure,tr,h2,h3{break-inside:avoid}
  h2,h3,summary,.caption{break-after:avoid}
  details::details-content{content-visibility:visible;display:block;height:auto}
  *{print-color-adjust:exact;-webkit-print-color-adjust:exact}
}
"""
)
