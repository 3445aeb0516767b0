//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/carrel-dev/carrel/cli/bench/rig"
)

// runner has what the benches share: the engine, the direct sshd and its other ways, and where files lie.
type runner struct {
	setup    setup
	report   report
	programs rig.Programs
	engine   *rig.Engine
	meter    *rig.Meter // nil where CPU time cannot be counted
	dir      string     // state and keys, on disk
	data     string     // payloads, in memory
	sshd     *rig.SSHD
	began    time.Time
}

func newRunner(ctx context.Context, s setup) (*runner, error) {
	r := &runner{setup: s, began: time.Now()}
	var err error
	if s.Subject == "carrel" {
		if r.programs, err = rig.FindPrograms(s.Bin); err != nil {
			return nil, err
		}
		if r.engine, err = rig.NewEngine(); err != nil {
			return nil, err
		}
		if err := r.engine.HasImage(ctx, s.Image); err != nil {
			return nil, err
		}
	}
	r.report.Machine, r.report.Setup = rig.ThisMachine(ctx, r.engine), s
	if s.Subject == "carrel" {
		if r.report.Machine.Version, err = r.programs.Version(ctx); err != nil {
			return nil, err
		}
	}
	r.say("%s", r.report.Machine)
	if r.dir, err = os.MkdirTemp("", "carrel-bench-"); err != nil {
		return nil, err
	}
	if r.data, err = os.MkdirTemp(s.Dir, "carrel-bench-"); err != nil {
		return nil, errors.Join(err, os.RemoveAll(r.dir))
	}
	if r.meter, err = rig.NewMeter(); err != nil {
		r.say("CPU time is not counted: %v", err)
	}
	if r.sshd, err = rig.StartSSHD(ctx, filepath.Join(r.dir, "sshd"), filepath.Join(r.data, "direct")); err != nil {
		return nil, errors.Join(err, r.close(ctx))
	}
	return r, nil
}

// close leaves nothing behind.
func (r *runner) close(context.Context) error {
	var faults []error
	if r.sshd != nil {
		faults = append(faults, r.sshd.Stop())
	}
	if r.meter != nil {
		faults = append(faults, r.meter.Close())
	}
	if r.engine != nil {
		r.engine.Close()
	}
	return errors.Join(append(faults, os.RemoveAll(r.data), os.RemoveAll(r.dir))...)
}

// calm waits for a moment in which other programs leave the machine alone, as far as -calm allows.
func (r *runner) calm(ctx context.Context) error {
	waited, err := rig.Calm(ctx, r.setup.Calm)
	if waited > 0 {
		r.say("waited %.0f s for a quiet machine", waited.Seconds())
	}
	return err
}

func (r *runner) say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "[bench %.0f s] %s\n", time.Since(r.began).Seconds(), fmt.Sprintf(format, args...))
}

// try runs one bench; one that fails is named in the report and the others go on. It reports whether it was done.
func (r *runner) try(ctx context.Context, name string, bench func(context.Context) error) bool {
	if ctx.Err() != nil {
		return false
	}
	r.say("%s", name)
	err := bench(ctx)
	if err == nil {
		return true
	}
	r.say("%s: %v", name, err)
	r.report.Faults = append(r.report.Faults, name+": "+err.Error())
	return false
}

func (r *runner) all(ctx context.Context) error {
	if r.setup.Subject == "sshd" {
		r.try(ctx, "a second sshd as subject", r.sshdSubject)
		return ctx.Err()
	}
	if r.setup.wants("standing") {
		r.try(ctx, "standing", r.standing)
	}
	if r.setup.wants("up") || r.wantsSSH() {
		r.try(ctx, "deployment "+string(r.setup.Layout), func(ctx context.Context) error { return r.deployment(ctx, r.setup.Layout) })
	}
	if r.setup.wants("copy-tls") {
		r.try(ctx, "deployment "+string(rig.SplitTLS), func(ctx context.Context) error { return r.deployment(ctx, rig.SplitTLS) })
	}
	if r.setup.wants("go") {
		r.try(ctx, "go", func(ctx context.Context) error {
			rows, err := goBench(ctx, goPackages(), r.setup.Benchtime)
			r.report.add(rows...)
			return err
		})
	}
	return ctx.Err()
}

func (r *runner) wantsSSH() bool {
	return r.setup.wants("copy") || r.setup.wants("roundtrip") || r.setup.wants("bulk") || r.setup.wants("idle")
}

func (r *runner) standing(ctx context.Context) error {
	c, err := r.start(ctx, rig.Dev, "standing")
	if err != nil {
		return err
	}
	rows, err := standingStill(ctx, "carreld dev", r.setup.Wait, r.setup.Watch, c.Gateway.PID())
	r.report.add(rows...)
	return errors.Join(err, c.Stop())
}

func (r *runner) start(ctx context.Context, layout rig.Layout, name string) (*rig.Carrel, error) {
	dir := filepath.Join(r.dir, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	return rig.StartCarrel(ctx, r.programs, layout, dir)
}

const workspaceName = "bench"

// deployment starts gateway and agent, runs the benches that belong to the layout, and removes all of it.
func (r *runner) deployment(ctx context.Context, layout rig.Layout) (err error) {
	c, err := r.start(ctx, layout, string(layout))
	if err != nil {
		return err
	}
	defer func() {
		left, removeErr := c.RemoveAll(context.WithoutCancel(ctx), r.engine)
		for _, l := range left {
			r.say("`carrel rm` left %s, removed now", l)
		}
		err = errors.Join(err, removeErr, c.Stop())
	}()
	if r.setup.wants("up") && layout != rig.SplitTLS {
		r.try(ctx, "up", func(ctx context.Context) error { return r.up(ctx, c) })
	}
	if layout != rig.SplitTLS && !r.wantsSSH() {
		return nil
	}
	if _, _, err := c.CLI(ctx, "up", workspaceName, "--image", r.setup.Image, "--gpu", "1", "-q"); err != nil {
		return err
	}
	box, err := c.Container(ctx, r.engine, workspaceName)
	if err != nil {
		return err
	}
	if err := r.engine.LiftCPULimit(ctx, box.ID); err != nil {
		return err
	}
	return r.overSSH(ctx, subject{path: c.Path(workspaceName), layout: layout, also: []int{box.PID}, parts: parts(c, box)})
}

func parts(c *rig.Carrel, box rig.Container) []part {
	inside := part{name: "carrel-init and the command, in the workspace", pids: tree(box.PID)}
	if c.Layout == rig.Dev {
		return []part{{name: "carreld dev (gateway and agent)", sides: 2, pids: pids(c.Gateway.PID())}, inside}
	}
	return []part{
		{name: "gateway", sides: 1, pids: pids(c.Gateway.PID())},
		{name: "agent", sides: 1, pids: pids(c.Agent.PID())},
		inside,
	}
}

func (r *runner) up(ctx context.Context, c *rig.Carrel) error {
	b := &startBench{carrel: c, engine: r.engine, image: r.setup.Image}
	if err := b.rounds(ctx, r.setup.Rounds, r.calm, r.say); err != nil {
		return err
	}
	r.report.add(b.rows()...)
	return nil
}

// subject is what is compared with the direct sshd.
type subject struct {
	path   rig.Path
	layout rig.Layout
	also   []int  // processes whose control groups do work for it
	parts  []part // what is looked at with idle sessions
}

// sshdSubject puts a second sshd where Carrel would be: all ratios should be 1.
func (r *runner) sshdSubject(ctx context.Context) error {
	second, err := rig.StartSSHD(ctx, filepath.Join(r.dir, "sshd2"), filepath.Join(r.data, "second"))
	if err != nil {
		return err
	}
	path := second.Path
	path.Name = "carrel"
	err = r.overSSH(ctx, subject{path: path, layout: rig.Split, parts: []part{{name: "a second sshd", sides: 1, pids: tree(second.PID())}}})
	return errors.Join(err, second.Stop())
}

// overSSH runs the benches that need nothing but a way to ssh.
func (r *runner) overSSH(ctx context.Context, s subject) error {
	if s.layout == rig.SplitTLS {
		r.try(ctx, "copy with TLS on both legs", func(ctx context.Context) error { return r.copy(ctx, s, nil) })
		return nil
	}
	jump, err := r.sshd.Jump()
	if err != nil {
		return err
	}
	relayed, stop, err := r.sshd.Relayed(ctx)
	if err != nil {
		return err
	}
	defer stop()
	peers := []rig.Path{relayed, jump}
	if r.setup.wants("copy") {
		r.try(ctx, "copy", func(ctx context.Context) error { return r.copy(ctx, s, peers) })
	}
	if r.setup.wants("roundtrip") {
		r.try(ctx, "roundtrip", func(ctx context.Context) error { return r.roundtrip(ctx, s, peers[:1]) })
	}
	if r.setup.wants("bulk") {
		r.try(ctx, "roundtrip beside bulk", func(ctx context.Context) error { return r.besideBulk(ctx, s, relayed) })
	}
	if r.setup.wants("idle") {
		r.try(ctx, "idle", func(ctx context.Context) error { return r.idle(ctx, s) })
	}
	return nil
}

func (r *runner) copy(ctx context.Context, s subject, peers []rig.Path) (err error) {
	c, err := newCopyBench(r.meter, r.data, r.setup.SizeMiB<<20)
	if err != nil {
		return err
	}
	c.also = s.also
	paths := append([]rig.Path{s.path, r.sshd.Path}, peers...)
	for _, p := range paths {
		if err := c.warm(ctx, p); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, c.clean(context.WithoutCancel(ctx), p)) }()
	}
	err = c.rounds(ctx, paths, legs(), r.setup.Rounds, r.calm, r.say)
	if c.done == 0 {
		return err
	}
	// Also where a later round was interrupted: each round stands for itself.
	for _, p := range paths[1:] {
		r.report.add(c.rows(legs(), s.layout, s.path.Name, p.Name)...)
	}
	return err
}

func (r *runner) roundtrip(ctx context.Context, s subject, peers []rig.Path) error {
	paths := append([]rig.Path{s.path, r.sshd.Path}, peers...)
	e, err := openEchoes(ctx, paths)
	if err != nil {
		return err
	}
	defer e.close()
	took, err := e.measure(ctx, r.setup.Rounds, r.setup.Trips, r.calm)
	if err != nil {
		return err
	}
	for _, p := range paths[1:] {
		p50 := tripRow("roundtrip", "a byte through an open session", took, 0.5, s.path.Name, p.Name)
		if p.Name == "relayed" {
			p50.Target, p50.Better = 1.1, lower
		}
		r.report.add(p50, tripRow("roundtrip", "a byte through an open session", took, 0.99, s.path.Name, p.Name))
	}
	return nil
}

const (
	bulkStreams = 4
	bulkLimit   = 5 // ms, p99
)

// besideBulk measures round trips while downloads run: over connections of their own, and for one peer as channels of one
// connection (ControlMaster), which is how people share a connection without Carrel. Downloads without a limit take all
// cores of a small machine, where each further process on the way waits for its turn; the relays show that part.
func (r *runner) besideBulk(ctx context.Context, s subject, relayed rig.Path) error {
	shared, err := r.sshd.Shared()
	if err != nil {
		return err
	}
	all := map[string][][]float64{}
	ways := []struct {
		path    rig.Path
		streams int
	}{{s.path, bulkStreams}, {r.sshd.Path, bulkStreams}, {relayed, bulkStreams}, {shared, 1}}
	for round := range r.setup.Rounds {
		if err := r.calm(ctx); err != nil {
			return err
		}
		for _, w := range rotated(ways, round) {
			took, err := besideOne(ctx, w.path, w.streams, r.setup.Trips)
			if err != nil {
				return fmt.Errorf("%s: %w", w.path.Name, err)
			}
			all[w.path.Name] = append(all[w.path.Name], took)
		}
		r.say("round %d of %d", round+1, r.setup.Rounds)
	}
	what := fmt.Sprintf("a byte beside %d downloads", bulkStreams)
	p99 := quantiles(all[s.path.Name], 0.99)
	limit := row{
		Bench: "bulk", What: what + ", p99 against the limit", Ratio: median(p99) / bulkLimit, Target: 1, Better: lower,
		Subject: fmt.Sprintf("%.1f ms", median(p99)), Peer: fmt.Sprintf("%d ms", bulkLimit),
	}
	mux := tripRow("bulk", what, all, 0.99, s.path.Name, shared.Name)
	mux.Target, mux.Better, mux.Note = 0.3, lower, "the peer: one download and the byte share a connection"
	r.report.add(limit, mux)
	for _, peer := range []string{relayed.Name, r.sshd.Path.Name} {
		r.report.add(tripRow("bulk", what, all, 0.99, s.path.Name, peer), tripRow("bulk", what, all, 0.5, s.path.Name, peer))
	}
	return nil
}

func besideOne(ctx context.Context, p rig.Path, streams, trips int) ([]float64, error) {
	commands := make([][]string, streams)
	for i := range commands {
		commands[i] = p.SSH("exec cat /dev/zero")
	}
	stop, err := bulk(ctx, commands, p.Env)
	if err != nil {
		return nil, err
	}
	defer stop()
	e, err := openEchoes(ctx, []rig.Path{p})
	if err != nil {
		return nil, err
	}
	defer e.close()
	took, err := e.measure(ctx, 1, trips, func(context.Context) error { return nil })
	if err != nil {
		return nil, err
	}
	return took[p.Name][0], nil
}

func (r *runner) idle(ctx context.Context, s subject) error {
	for _, way := range []struct {
		path   rig.Path
		parts  []part
		limits bool
	}{
		{s.path, s.parts, true},
		{r.sshd.Path, []part{{name: "direct sshd with its sessions and commands", pids: tree(r.sshd.PID())}}, false},
	} {
		b := &idleBench{path: way.path, sessions: r.setup.Sessions, settle: r.setup.Settle}
		costs, took, err := b.measure(ctx, way.parts)
		if err != nil {
			return fmt.Errorf("%s: %w", way.path.Name, err)
		}
		r.say("%s: %d sessions were open after %.1f s", way.path.Name, b.sessions, took.Seconds())
		for i, p := range way.parts {
			r.report.add(b.rows(p, costs[i], way.limits && p.sides > 0)...)
		}
	}
	return nil
}
