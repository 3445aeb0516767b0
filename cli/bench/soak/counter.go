//go:build linux

package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/carrel-dev/carrel/cli/bench/rig"
)

// counter is a program inside the steady workspace that writes a line every 0.2 s. It shows that nothing outside ever
// touches a workspace: no number is missing, none comes twice, and no two are far apart.
type counter struct {
	soak *soak
	path rig.Path
	pid  int // of the container's first process
	last int
	seen time.Time // when it was last found to go on
}

const (
	counterStart = `setsid nohup sh -c 'i=0; while :; do i=$((i+1)); echo "$i $(date +%s)" >> count; sleep 0.2; done' > /dev/null 2>&1 < /dev/null & echo started`
	// counterGap is the longest time between two lines; they have whole seconds, and a busy machine sleeps longer.
	counterGap = 10 * time.Second
)

func newCounter(ctx context.Context, k *soak) (*counter, error) {
	c := &counter{soak: k, path: k.carrel.Path(steady), seen: time.Now()}
	box, err := k.carrel.Container(ctx, k.engine, steady)
	if err != nil {
		return nil, err
	}
	c.pid = box.PID
	_, _, err = rig.Run{Env: c.path.Env}.Do(ctx, c.path.SSH(counterStart))
	return c, err
}

// reachable reports whether a command runs inside by plain ssh.
func (c *counter) reachable(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, adoptLimit)
	defer cancel()
	_, _, err := rig.Run{Env: c.path.Env}.Do(ctx, c.path.SSH("true"))
	return err == nil
}

// linesAtOnce bounds one read of the counter's file.
const linesAtOnce = 3000

// check reads all numbers since the last check, and the container's process id.
func (c *counter) check(ctx context.Context) {
	began := c.last
	for {
		before := c.last
		if !c.read(ctx) {
			return
		}
		if c.last-before < linesAtOnce-1 {
			break
		}
	}
	switch {
	case c.last > began:
		c.seen = time.Now()
	case time.Since(c.seen) > counterGap:
		c.soak.report.fault("%s: the counter stands still at %d", steady, c.last)
	}
	box, err := c.soak.carrel.Container(ctx, c.soak.engine, steady)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		c.soak.report.fault("%s: %v", steady, err)
	case box.PID != c.pid:
		c.soak.report.fault("%s runs in another container process now (%d, not %d): it was restarted", steady, box.PID, c.pid)
		c.pid = box.PID
	}
}

// read takes the next lines of the counter's file, beginning with the last one that is known.
func (c *counter) read(ctx context.Context) bool {
	first := max(c.last, 1)
	var out string
	ok := c.soak.insist(ctx, steady+": read the counter", func() (err error) {
		command := fmt.Sprintf("tail -n +%d count | head -n %d", first, linesAtOnce)
		out, _, err = rig.Run{Env: c.path.Env}.Do(ctx, c.path.SSH(command))
		return err
	})
	if !ok {
		return false
	}
	last, err := checkCount(out, first)
	if err != nil {
		c.soak.report.fault("%s: %v", steady, err)
		return false
	}
	c.last = last
	return true
}

// checkCount reads lines "number unix-seconds" that begin at first and returns the last number.
func checkCount(text string, first int) (int, error) {
	want, before := first, int64(0)
	for line := range strings.Lines(text) {
		number, at, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, err := strconv.Atoi(number)
		if err != nil {
			return want - 1, fmt.Errorf("the counter's line %q has no number", line)
		}
		if n != want {
			return n, fmt.Errorf("the counter has %d where %d should be", n, want)
		}
		t, err := strconv.ParseInt(at, 10, 64)
		if err != nil {
			return n, fmt.Errorf("the counter's line %q has no time", line)
		}
		if gap := time.Duration(t-before) * time.Second; before > 0 && gap > counterGap {
			return n, fmt.Errorf("the counter stood still for %v before %d", gap, n)
		}
		want, before = n+1, t
	}
	return want - 1, nil
}
