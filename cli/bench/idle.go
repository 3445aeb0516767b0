//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/carrel-dev/carrel/cli/bench/rig"
)

// Limits for one idle stream on each side: 10 KiB and 2 descriptors.
const (
	idleKiB         = 10
	idleDescriptors = 2
)

// part is a set of processes whose cost is looked at, such as the gateway.
type part struct {
	name  string
	sides float64 // how many sides of a stream it holds: 1, or 2 where gateway and agent are one process
	pids  func() ([]int, error)
}

// idleCost is what one part cost before, with, and after the sessions.
type idleCost struct{ before, with, after rig.Cost }

// idleBench opens sessions that do nothing and looks at what each costs.
type idleBench struct {
	path     rig.Path
	sessions int
	settle   time.Duration // wait before each look, so that garbage collectors have run
}

// openAtOnce is how many sessions are being set up at a time.
const openAtOnce = 4

func (b *idleBench) measure(ctx context.Context, parts []part) ([]idleCost, time.Duration, error) {
	costs := make([]idleCost, len(parts))
	look := func(into func(*idleCost) *rig.Cost) error {
		if err := pause(ctx, b.settle); err != nil {
			return err
		}
		for i, p := range parts {
			pids, err := p.pids()
			if err != nil {
				return err
			}
			if *into(&costs[i]), err = rig.Measure(pids...); err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
		}
		return nil
	}
	if err := look(func(c *idleCost) *rig.Cost { return &c.before }); err != nil {
		return nil, 0, err
	}
	began := time.Now()
	open, err := b.open(ctx)
	took := time.Since(began)
	if err == nil {
		err = look(func(c *idleCost) *rig.Cost { return &c.with })
	}
	for _, s := range open {
		s.Abort()
	}
	if err != nil {
		return nil, 0, err
	}
	return costs, took, look(func(c *idleCost) *rig.Cost { return &c.after })
}

// open starts the sessions and waits until each one's command runs.
func (b *idleBench) open(ctx context.Context) ([]*rig.Session, error) {
	var mu sync.Mutex
	var open []*rig.Session
	var failed error
	var wg sync.WaitGroup
	turns := make(chan struct{}, openAtOnce)
	for range b.sessions {
		turns <- struct{}{}
		wg.Go(func() {
			defer func() { <-turns }()
			s, err := b.one(ctx)
			mu.Lock()
			defer mu.Unlock()
			if err != nil && failed == nil {
				failed = err
			}
			if s != nil {
				open = append(open, s)
			}
		})
		mu.Lock()
		stop := failed != nil
		mu.Unlock()
		if stop {
			break
		}
	}
	wg.Wait()
	return open, failed
}

func (b *idleBench) one(ctx context.Context) (*rig.Session, error) {
	s, err := rig.Open(ctx, b.path.SSH("echo ready; exec cat"), b.path.Env)
	if err != nil {
		return nil, err
	}
	answer := make([]byte, len("ready\n"))
	if _, err := io.ReadFull(s.Out, answer); err != nil {
		return nil, fmt.Errorf("%s: %w: %w", b.path.Name, err, s.Close())
	}
	return s, nil
}

// rows are what one part cost per session.
func (b *idleBench) rows(p part, c idleCost, limits bool) []row {
	n := float64(b.sessions)
	pss, rss := (c.with.PSSKiB-c.before.PSSKiB)/n, (c.with.RSSKiB-c.before.RSSKiB)/n
	fds := float64(c.with.Descriptors-c.before.Descriptors) / n
	if !limits {
		return []row{{
			Bench: "idle", What: fmt.Sprintf("%s: Pss per idle ssh session, against the limit of one side of ours", p.name), Ratio: pss / idleKiB,
			Subject: fmt.Sprintf("%.1f KiB (RSS %.1f), %.1f descriptors", pss, rss, fds), Peer: fmt.Sprintf("%d KiB", idleKiB), Note: "for comparison",
		}}
	}
	back := fmt.Sprintf("%+.0f KiB and %+d descriptors after all have ended", c.after.PSSKiB-c.before.PSSKiB, c.after.Descriptors-c.before.Descriptors)
	return []row{
		{
			Bench: "idle", What: fmt.Sprintf("%s: Pss per idle ssh session at %d, against the limit", p.name, b.sessions),
			Ratio: pss / (idleKiB * p.sides), Target: 1, Better: lower,
			Subject: fmt.Sprintf("%.1f KiB (RSS %.1f)", pss, rss), Peer: fmt.Sprintf("%.0f KiB", idleKiB*p.sides), Note: back,
		},
		{
			Bench: "idle", What: p.name + ": descriptors per idle ssh session, against the limit",
			Ratio: fds / (idleDescriptors * p.sides), Target: 1, Better: lower,
			Subject: fmt.Sprintf("%.2f", fds), Peer: fmt.Sprintf("%.0f", idleDescriptors*p.sides),
		},
	}
}

// pids is a part's processes that never change.
func pids(ids ...int) func() ([]int, error) {
	return func() ([]int, error) { return ids, nil }
}

// tree is a process with all that descend from it, as they are at each look.
func tree(root int) func() ([]int, error) {
	return func() ([]int, error) { return rig.Tree(root) }
}

// pause waits; it is part of what is measured (standing still), not a way to synchronise.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
