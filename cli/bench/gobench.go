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
	return []string{"./proto/stream/...", "./services/scheduler", "./services/sqlite", "./services/tunnel", "./services/usage", "./agent/nvml", "./agent/link", "./agent/initd"}
}

// goTarget is a limit in milliseconds for the time of one operation; benchmarks without one are shown for comparison.
// Sources: rows 9 and 12 of the list of workloads in docs/performance.md.
func goTarget(name string) float64 {
	switch name {
	case "BenchmarkPlan625x8With10000Waiting":
		return 20 // ms, a whole pass over 10,000 requests and 5,000 GPUs
	case "BenchmarkSample8":
		return 5 // ms, 0.5 % of a core at one sample a second of 8 GPUs
	default:
		return 0
	}
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
	texts := make([]string, len(g.values))
	for i, v := range g.values {
		texts[i] = fmt.Sprintf("%.4g %s", v.value, v.unit)
		if limit := goTarget(g.name); limit > 0 && v.unit == "ns/op" {
			r.Ratio, r.Target, r.Better, r.Peer = v.value/1e6/limit, 1, lower, fmt.Sprintf("%.0f ms", limit)
		}
	}
	r.Subject = strings.Join(texts, ", ")
	return r
}
