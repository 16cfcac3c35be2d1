# A coding agent as [agent]: run = ["sh", "mini.sh"], after `pip install mini-swe-agent`, which may have an environment
# of its own. It runs the commands that the model writes, here in a sandbox (`apt-get install bubblewrap`).
question=$(python3 -c 'import json, os; print(json.loads(os.environ["TASK"])["question"])')
export HOME="$PWD" MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors LITELLM_LOCAL_MODEL_COST_MAP=True
# A request that Treegraft refused, such as one past a limit, would be refused again.
export MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT=1
# litellm finds the server in OPENAI_BASE_URL; "openai/" before the model's name says what kind of server it is.
mini -m openai/policy -t "$question" --yolo --exit-immediately -l 0 --environment-class bubblewrap -o run.json >log.txt
# What it submitted is the answer, nothing if it gave up.
python3 -c 'import json; print(json.dumps({"answer": json.load(open("run.json"))["info"]["submission"].strip()}))'
