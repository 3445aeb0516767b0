//go:build linux

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/carrel-dev/carrel/cli/bench/rig"
)

// Limits of gateway and agent together without any workspace. Newcomers' peers, measured once: JupyterHub and its proxy
// 178 MiB and 0.34 CPU-s a minute, dstack 248 MiB and 0.97.
const (
	standingMiB       = 45
	standingCPUSecond = 0.2 // in a minute
)

// standingStill waits after a start and then watches processes for a while that have nothing to do.
func standingStill(ctx context.Context, name string, wait, watch time.Duration, pids ...int) ([]row, error) {
	if err := pause(ctx, wait); err != nil {
		return nil, err
	}
	before, err := rig.Measure(pids...)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	if err := pause(ctx, watch); err != nil {
		return nil, err
	}
	after, err := rig.Measure(pids...)
	if err != nil {
		return nil, err
	}
	cpu := (after.CPU - before.CPU).Seconds() * time.Minute.Seconds() / time.Since(began).Seconds()
	rss, pss := after.RSSKiB/1024, after.PSSKiB/1024
	limit := fmt.Sprintf("%d MiB", standingMiB)
	note := fmt.Sprintf("%v after the start; %d descriptors, %d threads", wait, after.Descriptors, after.Threads)
	return []row{
		{Bench: "standing", What: name + ": RSS, against the limit", Ratio: rss / standingMiB, Target: 1, Better: lower, Subject: fmt.Sprintf("%.1f MiB", rss), Peer: limit, Note: note},
		{Bench: "standing", What: name + ": Pss, against the limit", Ratio: pss / standingMiB, Target: 1, Better: lower, Subject: fmt.Sprintf("%.1f MiB", pss), Peer: limit},
		{
			Bench: "standing", What: name + ": CPU time, against the limit", Ratio: cpu / standingCPUSecond, Target: 1, Better: lower,
			Subject: fmt.Sprintf("%.2f CPU-s/min", cpu), Peer: fmt.Sprintf("%.1f CPU-s/min", standingCPUSecond), Note: fmt.Sprintf("over %v", watch),
		},
	}, nil
}
