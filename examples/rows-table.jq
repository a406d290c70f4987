def n(f): map(select(f)) | length;
def ok(name): n(any(.steps[]; .name == name and .outcome != "failed"));
.instances | group_by([.dataset, if any(.steps[]; .name == "mirrored" and .outcome == "ok") then .repo else null end])[]
| [.[0].dataset, (if ok("mirrored") > 0 then .[0].repo else "\(map(.repo) | unique | length) others" end), length,
   ok("mirrored"), n(.status == "ready"), ok("seal"), ok("@test_patch"), ok("@patch"),
   ok("environment"), ok("tests before"), ok("tests after"),
   (map(.duration_s) | add / length * 10 | round / 10),
   (map(.weighed.size_bytes // 0) | unique | add / 1048576 | round),
   (map(select(.status != "ready") | .error.code // "content") | group_by(.) | map("\(length) \(.[0])") | join(", "))]
| "| \(map(tostring) | join(" | ")) |"
