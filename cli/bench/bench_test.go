//go:build linux

package main

import (
	"context"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestQuantilesAndMedian(t *testing.T) {
	values := []float64{5, 1, 4, 2, 3}
	for q, want := range map[float64]float64{0: 1, 0.5: 3, 0.8: 4, 0.99: 5, 1: 5} {
		if got := quantile(values, q); got != want {
			t.Errorf("quantile %v is %v, want %v", q, got, want)
		}
	}
	if got := median([]float64{4, 1, 2, 3}); got != 2.5 {
		t.Errorf("median is %v", got)
	}
	if !math.IsNaN(median(nil)) || !math.IsNaN(quantile(nil, 0.5)) {
		t.Error("no values have a median")
	}
}

func TestRowsKnowTheirTargets(t *testing.T) {
	for _, c := range []struct {
		row  row
		want string
	}{
		{row{Ratio: 0.8, Target: 0.75, Better: higher}, "met"},
		{row{Ratio: 0.61, Target: 0.75, Better: higher}, "near"},
		{row{Ratio: 0.59, Target: 0.75, Better: higher}, "MISSED"},
		{row{Ratio: 1.1, Target: 1.15, Better: lower}, "met"},
		{row{Ratio: 1.4, Target: 1.15, Better: lower}, "near"},
		{row{Ratio: 1.5, Target: 1.15, Better: lower}, "MISSED"},
		{row{Ratio: math.NaN(), Target: 1, Better: lower}, "MISSED"},
		{row{Ratio: 9}, ""},
	} {
		if got := c.row.verdict(); got != c.want {
			t.Errorf("%+v: %q, want %q", c.row, got, c.want)
		}
	}
}

func TestParseGoBench(t *testing.T) {
	const out = `goos: linux
pkg: github.com/carrel-dev/carrel/services/scheduler
BenchmarkPlan625x8With10000Waiting-2   	     100	  10000000 ns/op	     120 B/op	 3 allocs/op
BenchmarkName/size=1-x-2 	 5 	 2.5 ns/op
BenchmarkThatSaidSomething-2 	some words that are no figures
PASS
`
	results := parseGoBench(out)
	if len(results) != 2 {
		t.Fatalf("%d results: %+v", len(results), results)
	}
	r := results[0].row()
	if r.Ratio != 0.5 || r.Better != lower || !strings.Contains(r.What, "services/scheduler Plan625x8With10000Waiting") {
		t.Errorf("row %+v", r)
	}
	if r := results[1].row(); r.Better != noTarget || !strings.HasSuffix(r.What, "Name/size=1-x") {
		t.Errorf("row %+v", r)
	}
}

func TestFlagsThatMakeNoSense(t *testing.T) {
	for _, args := range [][]string{{"-bench", "x"}, {"-subject", "x"}, {"-layout", "split-tls"}, {"-rounds", "0"}, {"-size", "0"}} {
		if _, err := parseFlags(args); err == nil {
			t.Errorf("%v was taken", args)
		}
	}
}

// A missing program is told before anything is started.
func TestMissingProgramsAreNamed(t *testing.T) {
	_, err := newRunner(context.Background(), setup{Subject: "carrel", Bin: t.TempDir(), Dir: t.TempDir()})
	if err == nil || !strings.Contains(err.Error(), "carrel-init") || !strings.Contains(err.Error(), "make build") {
		t.Errorf("got %v", err)
	}
}

// The measuring itself, with a second OpenSSH server as what is measured: all legs run, bytes arrive, figures are there.
func TestMeasuringASecondServer(t *testing.T) {
	dir := t.TempDir()
	s := setup{
		Subject: "sshd", Benches: []string{"copy", "roundtrip", "bulk", "idle"}, SizeMiB: 2, Rounds: 1, Trips: block,
		Sessions: 3, Settle: 10 * time.Millisecond, Dir: dir, JSON: filepath.Join(dir, "out.json"), Markdown: filepath.Join(dir, "out.md"),
	}
	if err := run(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(s.JSON)
	if err != nil {
		t.Fatal(err)
	}
	var r report
	if err := json.Unmarshal(content, &r); err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	for _, row := range r.Rows {
		seen[row.Bench]++
		if row.Bench != "idle" && (row.Ratio <= 0 || math.IsInf(row.Ratio, 0)) {
			t.Errorf("%s, %s: ratio %v", row.Bench, row.What, row.Ratio)
		}
	}
	if seen["copy split"] != 15 || seen["roundtrip"] != 4 || seen["bulk"] != 6 || seen["idle"] != 3 {
		t.Errorf("rows by bench: %v", seen)
	}
	left, err := filepath.Glob(filepath.Join(dir, "carrel-bench-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}
