# Judges govulncheck's text: awk -f vulnerabilities.awk ACCEPTED REPORT. Exit 1 where a module has a vulnerability that our code
# calls and that ACCEPTED does not name. What only a newer Go fixes is told, not failed: that is the builder's toolchain.
FNR == NR {
  if ($1 !~ /^#/ && NF > 1) { reason = $0; sub(/^[^ ]+ /, "", reason); accepted[$1] = reason }
  next
}
/^Vulnerability #/ { id = $3; found = "" }
/^  Standard library/ { where = "go" }
/^  Module: / { where = $2 }
/^    Found in: / { found = $3 }
/^    Fixed in: / {
  if (where == "go") {
    printf "warning: %s in %s, fixed in %s: build releases with that Go\n", id, found, $3
  } else if (id in accepted) {
    used[id] = 1
    printf "accepted: %s in %s: %s\n", id, found, accepted[id]
  } else {
    printf "FAIL %s in %s, fixed in %s: https://pkg.go.dev/vuln/%s\n", id, found, $3, id
    bad = 1
  }
}
END {
  for (id in accepted) if (!(id in used)) printf "no longer found, remove it from the accepted ones: %s\n", id
  exit bad
}
