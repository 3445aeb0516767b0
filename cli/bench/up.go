//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/carrel-dev/carrel/cli/bench/rig"
)

// starts holds milliseconds by round.
type starts struct {
	bare                        []float64 // engine: create and start
	up, upBanner, upSSH         []float64 // `carrel up` of a new workspace; and until the SSH server's banner; and until a byte of a command
	start, startBanner, startBy []float64 // the same for `carrel start` of a stopped one
}

// startBench brings workspaces up in turn with bare containers.
type startBench struct {
	carrel *rig.Carrel
	engine *rig.Engine
	image  string
	took   starts
}

func (b *startBench) rounds(ctx context.Context, rounds int, calm func(context.Context) error, say func(string, ...any)) error {
	steps := []func(context.Context, int) error{b.bare, b.workspace}
	// Round 0 warms the engine's and the file system's caches and does not count.
	for round := range rounds + 1 {
		if err := calm(ctx); err != nil {
			return err
		}
		for _, step := range rotated(steps, round) {
			if err := step(ctx, round); err != nil {
				return err
			}
		}
		if round == 0 {
			b.took = starts{}
			continue
		}
		say("round %d of %d", round, rounds)
	}
	return nil
}

func (b *startBench) bare(ctx context.Context, round int) error {
	name := "carrel-bench-" + strconv.Itoa(os.Getpid()) + "-" + strconv.Itoa(round)
	id, took, err := b.engine.CreateStart(ctx, name, b.image)
	if id != "" {
		// Also after Ctrl-C.
		err = errors.Join(err, b.engine.Remove(context.WithoutCancel(ctx), id))
	}
	b.took.bare = append(b.took.bare, milliseconds(took))
	return err
}

func (b *startBench) workspace(ctx context.Context, round int) error {
	name := "up-" + strconv.Itoa(round)
	ms := func(args ...string) (float64, error) {
		_, took, err := b.carrel.CLI(ctx, args...)
		return milliseconds(took), err
	}
	up, err := ms("up", name, "--image", b.image, "--gpu", "1", "-q")
	if err != nil {
		return err
	}
	banner, byCommand, err := b.firstBytes(ctx, name)
	if err != nil {
		return err
	}
	b.took.up = append(b.took.up, up)
	b.took.upBanner = append(b.took.upBanner, up+banner)
	b.took.upSSH = append(b.took.upSSH, up+byCommand)
	if _, err := ms("stop", name); err != nil {
		return err
	}
	start, err := ms("start", name, "-q")
	if err != nil {
		return err
	}
	if banner, byCommand, err = b.firstBytes(ctx, name); err != nil {
		return err
	}
	b.took.start = append(b.took.start, start)
	b.took.startBanner = append(b.took.startBanner, start+banner)
	b.took.startBy = append(b.took.startBy, start+byCommand)
	_, err = ms("rm", name, "--volume", "--yes")
	return err
}

// firstBytes returns the milliseconds from the start of ssh's ProxyCommand to the SSH server's banner, and from the start
// of ssh to the first byte of a command's output.
func (b *startBench) firstBytes(ctx context.Context, name string) (banner, byCommand float64, err error) {
	first, err := rig.FirstByte(ctx, b.carrel.Argv("proxy", "--workspace", name), b.carrel.Env())
	if err != nil {
		return 0, 0, err
	}
	p := b.carrel.Path(name)
	second, err := rig.FirstByte(ctx, p.SSH("echo", "ready"), p.Env)
	return milliseconds(first), milliseconds(second), err
}

func (b *startBench) rows() []row {
	t := b.took
	peer := fmt.Sprintf("%.0f ms (p95 %.0f) create+start by the engine's API", median(t.bare), quantile(t.bare, 0.95))
	one := func(what string, values []float64, target float64, note string) row {
		each := ratios(values, t.bare)
		r := row{
			Bench: "up", What: what, Ratio: median(each), Peer: peer, Note: note,
			Subject: fmt.Sprintf("%.0f ms (p95 %.0f), %+.0f ms", median(values), quantile(values, 0.95), median(values)-median(t.bare)),
		}
		if target > 0 {
			r.Target, r.Better = target, lower
		}
		return r.within(each)
	}
	return []row{
		one("`up` of a new workspace, until the command ends", t.up, 0, "program start, plan, watch and ssh files included"),
		one("`up` to the SSH server's banner", t.upBanner, 1.15, "through ssh's ProxyCommand"),
		one("`up` to the first byte of `ssh NAME.carrel echo`", t.upSSH, 0, "a whole ssh session included"),
		one("`start` of a stopped workspace to the banner", t.startBanner, 1.15, ""),
		one("`start` of a stopped workspace to the first byte of `ssh NAME.carrel echo`", t.startBy, 0, ""),
	}
}
