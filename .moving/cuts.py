"""Cuts before the moves: what two rooms share moves below both."""
import subprocess,re
def rd(p): return open(p).read()
def wr(p,s): open(p,'w').write(s)
s=rd('loadtest/transfer_rows.py'); i=s.index("def write_json("); fn=s[i:].rstrip()+"\n"; s=s[:i].rstrip()+"\n"
wr('loadtest/transfer_rows.py',s)
w=rd('loadtest/whole_table.py')
w=w.replace('"""Tables that can be pasted: never folded, however narrow the terminal is."""','"""What commands write: tables that can be pasted, and files of figures."""').replace("from rich import box","from pathlib import Path\n\nfrom rich import box").replace("from rich.table import Table\n","from rich.table import Table\n\nfrom baton.errors import ConfigError\n")
wr('loadtest/whole_table.py',w.rstrip()+"\n\n\n"+fn)
for p in subprocess.run(["git","grep","-l","write_json","--","*.py"],capture_output=True,text=True).stdout.split():
    s=rd(p)
    s=s.replace("from loadtest.transfer_rows import write_json","from loadtest.whole_table import write_json")
    def one(m):
        names=[n.strip() for n in m.group(1).split(",") if n.strip()]
        if "write_json" not in names: return m.group(0)
        names.remove("write_json")
        return f"from loadtest.transfer_rows import {', '.join(names)}\nfrom loadtest.whole_table import write_json\n"
    s=re.sub(r"from loadtest\.transfer_rows import \(([^)]*)\)\n",one,s)
    wr(p,s)
s=rd('loadtest/generator/slo.py')
i=s.index("    def met("); j=s.index("    def bounds("); s=s[:i]+s[j:]
s=s.replace("from loadtest.generator.request_record import RequestRecord\n","")
wr('loadtest/generator/slo.py',s)
s=rd('loadtest/generator/request_record.py').rstrip()+'''

    def met(self, slo: Slo) -> bool:
        """Whether it ended well, and within every bound."""
        return (
            self.outcome == "ok"
            and self.ttft_s <= slo.ttft_s
            and self.tpot_s <= slo.tpot_s
            and self.e2el_s <= slo.e2el_s
        )
'''
s=s.replace("from typing import Literal\n","from typing import Literal\n\nfrom loadtest.generator.slo import Slo\n")
wr('loadtest/generator/request_record.py',s)
s=rd('loadtest/generator/summary.py').replace("slo.met(record)","record.met(slo)"); wr('loadtest/generator/summary.py',s)
q='loadtest/research/peers/peer_goodput.py'; s=rd(q).replace('sum(map(slo.met, records))','sum(record.met(slo) for record in records)'); wr(q,s)
s=rd('tests/unit/loadtest/generator/test_slo.py')
s=s.replace("slo.met(record())","record().met(slo)").replace("Slo(tpot_s=1e-9).met(record(tokens=1))","record(tokens=1).met(Slo(tpot_s=1e-9))").replace("Slo(math.inf).met(record(outcome))","record(outcome).met(Slo(math.inf))"); wr('tests/unit/loadtest/generator/test_slo.py',s)
