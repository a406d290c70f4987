# The table of docs/datasets.md, of answers of `mirrord rehearse --json` or files of its --resume:
# jq -nr -f examples/rows-table.jq FILE…
def n(f): map(select(f)) | length;
def ok(name): n(any(.steps[]; .name == name and (.outcome == "ok" or .outcome == "but")));
# of steps that only --run has: nothing where no row came to them
def ran(name): if any(.[].steps[]; .name == name) then ok(name) else "" end;
def mib(name): map(select(.weighed) | {(.environment): .weighed[name]}) | add // {} | add
    | if . then . / 1048576 | round else "" end;
def why: (first(.steps[] | select(.outcome == "failed" or .outcome == "but") | .name) // "untried")
    + if .error then " (\(.error.code))" else "" end;
["data set", "repository", "rows", "mirrored", "ready", "seal", "test patch", "gold patch", "environment", "before",
 "after", "seconds", "MiB", "new MiB", "not ready"],
[range(15) | "---"],
([inputs | if has("instances") then .instances[] else . end]
 | group_by([.dataset, if any(.steps[]; .name == "mirrored" and .outcome == "ok") then .repo else null end])[]
 | [.[0].dataset, (if ok("mirrored") > 0 then .[0].repo else "not mirrored: \(map(.repo) | unique | length)" end), length,
    ok("mirrored"), n(.status == "ready"), ok("seal"), ok("@test_patch"), ok("@patch"),
    ran("environment"), ran("tests before"), ran("tests after"),
    (map(.duration_s) | add / length * 10 | round / 10), mib("size_bytes"), mib("disk_bytes"),
    (map(select(.status != "ready") | why) | group_by(.) | map("\(length) \(.[0])") | join(", "))])
| "| \(map(tostring) | join(" | ")) |"
