//go:build linux

// Command soak keeps real programs busy for a long time, kills them, and says what leaked, broke or was counted wrong.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/carrel-dev/carrel/cli/bench/rig"
)

// setup is what a run is asked to do.
type setup struct {
	time    time.Duration
	bin     string
	layout  rig.Layout
	image   string
	workers int
	report  string
	seed    uint64
	kill    time.Duration // mean time between two kills
}

func parseFlags(args []string) (setup, error) {
	whole := 30 * time.Minute
	if text := os.Getenv("SOAK_TIME"); text != "" {
		var err error
		if whole, err = time.ParseDuration(text); err != nil {
			return setup{}, fmt.Errorf("SOAK_TIME: %w; a duration is such as 30m or 2h", err)
		}
	}
	var s setup
	var layout string
	f := flag.NewFlagSet("soak", flag.ContinueOnError)
	f.DurationVar(&s.time, "time", whole, "how long it goes on (SOAK_TIME): half without faults, half with")
	f.StringVar(&s.bin, "bin", rig.BinDir(), "directory of carreld, carrel and carrel-init")
	f.StringVar(&layout, "layout", string(rig.Split), "split (gateway and agent apart) or dev (one process)")
	f.StringVar(&s.image, "image", "carrel/test:local", "image of the workspaces, present in the engine")
	f.IntVar(&s.workers, "workers", 2, "workspaces that come and go at a time; the machine needs one device more")
	f.StringVar(&s.report, "report", "docs/soak-report.md", "file for the report; empty: only the output")
	f.Uint64Var(&s.seed, "seed", uint64(time.Now().UnixNano()), "of the random times of kills")
	f.DurationVar(&s.kill, "kill", 25*time.Second, "mean time between two kills")
	if err := f.Parse(args); err != nil {
		return s, err
	}
	s.layout = rig.Layout(layout)
	if s.layout != rig.Split && s.layout != rig.Dev {
		return s, fmt.Errorf("-layout: %q is neither split nor dev", layout)
	}
	if s.time < time.Minute || s.workers < 1 || s.kill <= 0 {
		return s, errors.New("-time must be a minute or more, -workers 1 or more, -kill more than 0")
	}
	return s, nil
}

func main() {
	s, err := parseFlags(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "soak: %v\n", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err = run(ctx, s)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "soak: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, s setup) error {
	programs, err := rig.FindPrograms(s.bin)
	if err != nil {
		return err
	}
	engine, err := rig.NewEngine()
	if err != nil {
		return err
	}
	defer engine.Close()
	if err := engine.HasImage(ctx, s.image); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "carrel-soak-")
	if err != nil {
		return err
	}
	k := &soak{setup: s, engine: engine, random: rand.New(rand.NewPCG(s.seed, 0)), report: newReport(s, rig.ThisMachine(ctx, engine))}
	if k.report.machine.Version, err = programs.Version(ctx); err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	k.report.say("%s", k.report.machine)
	if k.carrel, err = rig.StartCarrel(ctx, programs, s.layout, filepath.Join(dir, "carrel")); err != nil {
		return err // dir stays: the logs are in it
	}
	err = errors.Join(k.all(ctx), k.end(context.WithoutCancel(ctx)))
	if err == nil && len(k.report.faults) == 0 {
		err = os.RemoveAll(dir)
	} else {
		k.report.say("logs are kept in %s", dir)
	}
	return errors.Join(err, k.report.finish(os.Stdout))
}
