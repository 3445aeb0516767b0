// Command testreport reads `go test -json` and prints what a person needs: each package's closing line as it comes, the
// output of failed tests, skipped tests with their reason, the slowest packages and tests, and the totals.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// slowestShown is how many packages and how many tests the closing tables name.
const slowestShown = 12

// event is one line of `go test -json` (see `go doc test2json`).
type event struct {
	Action     string
	Package    string
	ImportPath string
	Test       string
	Output     string
	Elapsed    float64 // seconds
}

type timed struct {
	name    string
	seconds float64
}

// report gathers the events of one run.
type report struct {
	out                     io.Writer
	output                  map[string][]string // of each test and package that has not ended, by name
	packages, tests         []timed
	passed, failed, skipped int
	skips                   []string
	broken                  bool // a package failed, by a test or otherwise
}

func main() {
	r := report{out: os.Stdout, output: map[string][]string{}}
	if err := r.read(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "testreport:", err)
		os.Exit(1)
	}
	r.close()
	if r.broken || r.failed > 0 {
		os.Exit(1)
	}
}

func (r *report) read(in io.Reader) error {
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			r.line(line)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read events: %w", err)
		}
	}
}

// line takes one event; what is no event (a message of the go command) is passed on as it is.
func (r *report) line(line []byte) {
	var e event
	if err := json.Unmarshal(line, &e); err != nil || e.Action == "" {
		fmt.Fprint(r.out, string(line))
		return
	}
	switch {
	case e.Action == "build-output":
		fmt.Fprint(r.out, e.Output)
	case e.Action == "build-fail":
		r.broken = true
	case e.Test != "":
		r.test(e)
	default:
		r.pkg(e)
	}
}

func (r *report) test(e event) {
	key := e.Package + " " + e.Test
	switch e.Action {
	case "output":
		r.output[key] = append(r.output[key], e.Output)
		return
	case "pass":
		r.passed++
	case "fail":
		r.failed++
		fmt.Fprintf(r.out, "--- FAIL: %s (%.2f s)\n%s", key, e.Elapsed, strings.Join(r.output[key], ""))
	case "skip":
		r.skipped++
		r.skips = append(r.skips, key+": "+reason(r.output[key]))
	default:
		return
	}
	delete(r.output, key)
	// A parent's time holds its subtests' times.
	if !strings.Contains(e.Test, "/") {
		r.tests = append(r.tests, timed{key, e.Elapsed})
	}
}

func (r *report) pkg(e event) {
	switch e.Action {
	case "output":
		r.output[e.Package] = append(r.output[e.Package], e.Output)
		if closing(e.Output) {
			fmt.Fprint(r.out, e.Output)
		}
		return
	case "fail":
		r.broken = true
		r.fail(e.Package)
	case "pass", "skip":
	default:
		return
	}
	delete(r.output, e.Package)
	if e.Elapsed > 0 {
		r.packages = append(r.packages, timed{e.Package, e.Elapsed})
	}
}

// fail prints what a failed package said outside its tests (a panic, a leak), and what a test that never ended said.
func (r *report) fail(pkg string) {
	for _, text := range r.output[pkg] {
		if !closing(text) {
			fmt.Fprint(r.out, text)
		}
	}
	for key, lines := range r.output {
		if strings.HasPrefix(key, pkg+" ") {
			r.failed++
			fmt.Fprintf(r.out, "--- DID NOT END: %s\n%s", key, strings.Join(lines, ""))
			delete(r.output, key)
		}
	}
}

// closing tells the lines with which go test ends a package.
func closing(text string) bool {
	return strings.HasPrefix(text, "ok  \t") || strings.HasPrefix(text, "FAIL\t")
}

// reason is the text of a test's t.Skip.
func reason(output []string) string {
	for _, text := range output {
		text = strings.TrimSpace(text)
		if text != "" && !strings.HasPrefix(text, "=== ") && !strings.HasPrefix(text, "--- ") {
			return text
		}
	}
	return "no reason given"
}

func (r *report) close() {
	r.table("slowest packages", r.packages)
	r.table("slowest tests", r.tests)
	for _, skip := range r.skips {
		fmt.Fprintln(r.out, "skipped:", skip)
	}
	fmt.Fprintf(r.out, "\ngo: %d passed, %d failed, %d skipped\n", r.passed, r.failed, r.skipped)
}

func (r *report) table(title string, rows []timed) {
	slices.SortStableFunc(rows, func(a, b timed) int { return int(1000 * (b.seconds - a.seconds)) })
	fmt.Fprintf(r.out, "\n%s\n", title)
	for _, row := range rows[:min(len(rows), slowestShown)] {
		fmt.Fprintf(r.out, "%9.2f s  %s\n", row.seconds, row.name)
	}
}
