//go:build linux

// Command bench measures the real programs against bare Docker and OpenSSH in one run and prints ratios.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/carrel-dev/carrel/cli/bench/rig"
)

// setup is what a run is asked to do.
type setup struct {
	Benches   []string      `json:"benches"`
	Bin       string        `json:"-"`
	Subject   string        `json:"subject"`
	Layout    rig.Layout    `json:"layout"`
	Image     string        `json:"image"`
	SizeMiB   int64         `json:"size_mib"`
	Rounds    int           `json:"rounds"`
	Trips     int           `json:"trips"`
	Sessions  int           `json:"sessions"`
	Settle    time.Duration `json:"settle_ns"`
	Wait      time.Duration `json:"standing_wait_ns"`
	Watch     time.Duration `json:"standing_watch_ns"`
	Calm      time.Duration `json:"calm_ns"`
	Benchtime string        `json:"go_benchtime"`
	Dir       string        `json:"-"`
	JSON      string        `json:"-"`
	Markdown  string        `json:"-"`
	Gate      bool          `json:"gate"`
}

// allBenches are in the order in which they run: what must not be disturbed first.
func allBenches() []string {
	return []string{"standing", "up", "copy", "roundtrip", "bulk", "idle", "copy-tls", "go"}
}

func parseFlags(args []string) (setup, error) {
	var s setup
	var benches, layout string
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.StringVar(&benches, "bench", strings.Join(allBenches(), ","), "which of them, by comma")
	f.StringVar(&s.Bin, "bin", rig.BinDir(), "directory of carreld, carrel and carrel-init")
	f.StringVar(&s.Subject, "subject", "carrel", "carrel, or sshd: a second OpenSSH server in its place, which shows what the measuring itself adds")
	f.StringVar(&layout, "layout", string(rig.Split), "dev (gateway and agent in one process) or split, for all but standing")
	f.StringVar(&s.Image, "image", "carrel/test:local", "image of the workspaces, present in the engine")
	f.Int64Var(&s.SizeMiB, "size", 256, "MiB of random bytes for each transfer")
	f.IntVar(&s.Rounds, "rounds", 5, "rounds; each has subject and peers in turn")
	f.IntVar(&s.Trips, "trips", 1000, "round trips of a byte in each round and path")
	f.IntVar(&s.Sessions, "sessions", 200, "idle ssh sessions")
	f.DurationVar(&s.Settle, "settle", 20*time.Second, "wait before each look at idle sessions")
	f.DurationVar(&s.Wait, "wait", 90*time.Second, "wait after the start before standing still is measured")
	f.DurationVar(&s.Watch, "watch", time.Minute, "how long standing still is watched")
	f.DurationVar(&s.Calm, "calm", 0, "longest wait before each round until other programs use less than a quarter of a core")
	f.StringVar(&s.Benchtime, "benchtime", "1s", "go test's -benchtime for the packages' own benchmarks")
	f.StringVar(&s.Dir, "dir", "/dev/shm", "where the payload lies, best in memory; 3 times -size")
	f.StringVar(&s.JSON, "json", ".cache/bench.json", "file for the result as JSON; empty: none")
	f.StringVar(&s.Markdown, "markdown", "", "file for the result as a Markdown table; empty: none")
	f.BoolVar(&s.Gate, "gate", false, "fail where a ratio is worse than 0.8 of its target")
	if err := f.Parse(args); err != nil {
		return s, err
	}
	s.Layout = rig.Layout(layout)
	s.Benches = strings.FieldsFunc(benches, func(r rune) bool { return r == ',' || r == ' ' })
	return s, s.check()
}

func (s setup) check() error {
	var faults []error
	for _, b := range s.Benches {
		if !slices.Contains(allBenches(), b) {
			faults = append(faults, fmt.Errorf("-bench: there is no %q; there is %s", b, strings.Join(allBenches(), ", ")))
		}
	}
	if s.Subject != "carrel" && s.Subject != "sshd" {
		faults = append(faults, fmt.Errorf("-subject: %q is neither carrel nor sshd", s.Subject))
	}
	if s.Layout != rig.Dev && s.Layout != rig.Split {
		faults = append(faults, fmt.Errorf("-layout: %q is neither dev nor split", s.Layout))
	}
	if s.SizeMiB < 1 || s.Rounds < 1 || s.Trips < 1 || s.Sessions < 1 || s.Settle <= 0 || s.Wait <= 0 || s.Watch <= 0 {
		faults = append(faults, errors.New("-size, -rounds, -trips, -sessions, -settle, -wait and -watch must be more than 0"))
	}
	return errors.Join(faults...)
}

func (s setup) wants(bench string) bool { return slices.Contains(s.Benches, bench) }

func main() {
	s, err := parseFlags(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err = run(ctx, s)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, s setup) error {
	r, err := newRunner(ctx, s)
	if err != nil {
		return err
	}
	err = errors.Join(r.all(ctx), r.close(ctx))
	if tableErr := r.report.table(os.Stdout); tableErr != nil {
		return errors.Join(err, tableErr)
	}
	if s.JSON != "" {
		err = errors.Join(err, r.report.writeFile(s.JSON, r.report.json))
	}
	if s.Markdown != "" {
		err = errors.Join(err, r.report.writeFile(s.Markdown, r.report.markdown))
	}
	if len(r.report.Faults) > 0 {
		err = errors.Join(err, fmt.Errorf("%d of the benches could not be done (above)", len(r.report.Faults)))
	}
	if behind := r.report.behind(); s.Gate && len(behind) > 0 {
		err = errors.Join(err, fmt.Errorf("worse than %.1f of the target:\n  %s", gate, strings.Join(behind, "\n  ")))
	}
	return err
}
