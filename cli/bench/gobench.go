//go:build linux

package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

// goPackages are the packages whose own benchmarks belong to the summary.
func goPackages() []string {
	return []string{"./proto/stream/...", "./services/scheduler", "./services/sqlite", "./services/tunnel", "./services/usage", "./agent/nvml", "./agent/link"}
}

// goTarget is what one figure of a package's benchmark should be.
type goTarget struct {
	unit   string
	limit  float64
	better better
}

// goTargetOf returns the target of a benchmark; those without one are shown for comparison. docs/performance.md has the
// targets' reasons.
func goTargetOf(name string) goTarget {
	whole, part, _ := strings.Cut(name, "/")
	switch whole {
	case "BenchmarkPlan625x8With10000Waiting":
		return goTarget{"ns/op", 20e6, lower} // a whole pass over 10,000 requests and 5,000 GPUs
	case "BenchmarkSample8":
		return goTarget{"ns/op", 5e6, lower} // 0.5 % of a core at one sample a second of 8 GPUs
	case "BenchmarkPlacements":
		return goTarget{"placements/s", 20_000, higher}
	case "BenchmarkSamples":
		return goTarget{"samples/s", 300_000, higher}
	case "BenchmarkIdleTunnel":
		if part == "plain" {
			return goTarget{"KiB/tunnel", 10, lower}
		}
	}
	return goTarget{}
}

// goResult is one line of `go test -bench`.
type goResult struct {
	pkg, name string
	values    []goValue
}

type goValue struct {
	value float64
	unit  string
}

// goBench runs the benchmarks of the packages that exist.
func goBench(ctx context.Context, packages []string, benchtime string) ([]row, error) {
	var present []string
	for _, p := range packages {
		if _, err := os.Stat(strings.TrimSuffix(p, "/...")); err == nil {
			present = append(present, p)
		}
	}
	if len(present) == 0 {
		return nil, fmt.Errorf("none of %s is here: run this from the root of the checkout", strings.Join(packages, " "))
	}
	argv := append([]string{"test", "-run", "^$", "-bench", ".", "-benchmem", "-benchtime", benchtime, "-p", "1"}, present...)
	out, err := exec.CommandContext(ctx, "go", argv...).CombinedOutput()
	results := parseGoBench(string(out))
	rows := make([]row, len(results))
	for i, r := range results {
		rows[i] = r.row()
	}
	if err != nil {
		return rows, fmt.Errorf("go %s: %w\n%s", strings.Join(argv, " "), err, lastLines(string(out), 20))
	}
	return rows, nil
}

func lastLines(text string, n int) string {
	all := strings.Split(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(all[max(0, len(all)-n):], "\n")
}

// parseGoBench reads the output of `go test -bench` (golang.org/design/14313-benchmark-format).
func parseGoBench(out string) []goResult {
	var results []goResult
	pkg := ""
	for scan := bufio.NewScanner(strings.NewReader(out)); scan.Scan(); {
		fields := strings.Fields(scan.Text())
		if len(fields) == 2 && fields[0] == "pkg:" {
			pkg = fields[1]
		}
		if len(fields) < 4 || !strings.HasPrefix(fields[0], "Benchmark") {
			continue
		}
		r := goResult{pkg: pkg, name: fields[0]}
		if i := strings.LastIndexByte(r.name, '-'); i > 0 {
			if _, err := strconv.Atoi(r.name[i+1:]); err == nil {
				r.name = r.name[:i]
			}
		}
		for i := 2; i+1 < len(fields); i += 2 {
			v, err := strconv.ParseFloat(fields[i], 64)
			if err != nil {
				break
			}
			r.values = append(r.values, goValue{v, fields[i+1]})
		}
		if len(r.values) > 0 {
			results = append(results, r)
		}
	}
	return results
}

func (g goResult) row() row {
	const module = "github.com/carrel-dev/carrel/"
	r := row{Bench: "go", What: strings.TrimPrefix(g.pkg, module) + " " + strings.TrimPrefix(g.name, "Benchmark")}
	target := goTargetOf(g.name)
	texts := make([]string, len(g.values))
	for i, v := range g.values {
		texts[i] = v.text()
		switch {
		case target.limit > 0 && v.unit == target.unit:
			r.Ratio, r.Target, r.Better, r.Peer = v.value/target.limit, 1, target.better, goValue{target.limit, target.unit}.text()
		case target.limit == 0 && r.Ratio == 0 && (strings.HasPrefix(v.unit, "x-") || strings.HasPrefix(v.unit, "x_")):
			r.Ratio, r.Peer = v.value, strings.NewReplacer("x-", "", "x_", "", "_", " ").Replace(v.unit) // its own comparison
		}
	}
	r.Subject = strings.Join(texts, ", ")
	return r
}

func (v goValue) text() string {
	switch {
	case v.unit == "ns/op" && v.value >= 1e6:
		return fmt.Sprintf("%.4g ms/op", v.value/1e6)
	case v.value >= 1000:
		return fmt.Sprintf("%.0f %s", v.value, v.unit)
	default:
		return fmt.Sprintf("%.4g %s", v.value, v.unit)
	}
}
