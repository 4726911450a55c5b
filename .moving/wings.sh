set -e
cd /work/main; git worktree remove --force /tmp/wt/wings 2>/dev/null || true
git worktree add -q -B wings /tmp/wt/wings main; cd /tmp/wt/wings
R="nice /work/main/.venv/bin/ruff"
python3 /tmp/mv/cuts.py; $R check --fix -q . || true; $R format -q .; git commit -qam "loadtest: move what the planner shares below it" -m "write_json stands with the tables; a record knows whether it met an SLO."
for r in tests router deploy engine worker kvtransfer baton planning loadtest; do
python3 /tmp/mv/gen.py $r > /tmp/mv/$r.csv; python3 /tmp/mv/mv.py /tmp/mv/$r.csv > /tmp/mv/$r.log 2>&1 || { cat /tmp/mv/$r.log; exit 1; }
cat /tmp/mv/$r.csv >> tools/moves.csv; $R check --fix -q . > /dev/null || true; $R format -q .; for k in 1 2 3; do python3 /tmp/mv/wrap.py > /dev/null; done; $R format -q .; git add -A
git commit -qm "$r: give its modules folders that show its architecture" -m "Moved by script: git mv and rewritten imports; behavior is unchanged. tools/moves.csv maps old paths to new ones."; done
python3 /tmp/mv/fix.py; $R check --fix -q . || true; $R format -q .; $R check . | tail -3; PYTHONPATH=$PWD nice /work/main/.venv/bin/python -m tools.config_reference > /tmp/c.md; PYTHONPATH=$PWD nice /work/main/.venv/bin/python -m tools.metrics_reference > /tmp/m.md; cp /tmp/c.md docs/configuration.md; cp /tmp/m.md docs/metrics.md
git add -A; git commit -qm "wings: follow the moves where paths are computed"
python3 /tmp/mv/check.py; /work/main/.venv/bin/lint-imports | tail -40
