//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/carrel-dev/carrel/cli/bench/rig"
)

const (
	steady = "steady" // the workspace that must live through all of it
	// adoptLimit is how long a program has after a restart until its workspaces are known and reachable again.
	adoptLimit = 5 * time.Second
	// comeBack is how long after a restart a verb may still fail, as connections and links come back.
	comeBack = 10 * time.Second
	settle   = 20 * time.Second // before each look at memory, so that garbage collectors have run
)

// soak has what the phases share.
type soak struct {
	setup  setup
	carrel *rig.Carrel
	engine *rig.Engine
	random *rand.Rand
	report *report

	mu      sync.Mutex
	broken  int       // programs that are down on purpose now
	mendedT time.Time // when the last one was back
}

// all is the whole run: a quiet half, in which nothing may grow, and one with faults.
func (k *soak) all(ctx context.Context) error {
	if _, _, err := k.carrel.CLI(ctx, "up", steady, "--image", k.setup.image, "--gpu", "1", "-q"); err != nil {
		return err
	}
	c, err := newCounter(ctx, k)
	if err != nil {
		return err
	}
	half := k.setup.time / 2
	// Caches and pools fill first.
	if err := k.churn(ctx, min(half/4, 2*time.Minute)); err != nil {
		return err
	}
	before, err := k.look(ctx)
	if err != nil {
		return err
	}
	cycles := k.report.cycles
	if err := k.churn(ctx, half); err != nil {
		return err
	}
	after, err := k.look(ctx)
	if err != nil {
		return err
	}
	k.report.compare(before, after, k.report.cycles-cycles)
	c.check(ctx)
	err = k.withFaults(ctx, half, c)
	c.check(ctx)
	k.ledger(ctx)
	return err
}

// churn has workers make, use, stop, start and remove workspaces until d is over.
func (k *soak) churn(ctx context.Context, d time.Duration) error {
	end := time.Now().Add(d)
	var wg sync.WaitGroup
	for worker := range k.setup.workers {
		wg.Go(func() {
			for n := 0; time.Now().Before(end) && ctx.Err() == nil; n++ {
				k.cycle(ctx, fmt.Sprintf("w%d-%d", worker, n))
			}
		})
	}
	wg.Wait()
	return ctx.Err()
}

// cycle is the life of one workspace. A step that fails while a program is down is tried again; at any other time it is a fault.
func (k *soak) cycle(ctx context.Context, name string) {
	path := k.carrel.Path(name)
	verb := func(args ...string) func() error {
		return func() error { _, _, err := k.carrel.CLI(ctx, args...); return err }
	}
	ssh := func() error {
		out, _, err := rig.Run{Env: path.Env}.Do(ctx, path.SSH("cat >> mark; echo $CARREL_WORKSPACE; wc -c < mark"))
		if err == nil && !strings.HasPrefix(out, name+"\n") {
			return fmt.Errorf("ssh %s landed in %q", name, out)
		}
		return err
	}
	steps := []struct {
		what string
		do   func() error
	}{
		{"up", verb("up", name, "--image", k.setup.image, "--gpu", "1", "-q")},
		{"ssh", ssh},
		{"stop", verb("stop", name)},
		{"start", verb("start", name, "-q")},
		{"ssh after start", ssh},
		{"rm", k.remove(ctx, name)},
	}
	for _, s := range steps {
		if !k.insist(ctx, name+": "+s.what, s.do) {
			return
		}
	}
	k.report.cycle()
}

// remove takes "not found" for done where an earlier try was cut off.
func (k *soak) remove(ctx context.Context, name string) func() error {
	tries := 0
	return func() error {
		_, _, err := k.carrel.CLI(ctx, "rm", name, "--volume", "--yes")
		tries++
		if err != nil && tries > 1 && strings.Contains(err.Error(), "no workspace") {
			return nil
		}
		return err
	}
}

const insistLimit = 2 * time.Minute

// insist repeats a step while programs are down or coming back.
func (k *soak) insist(ctx context.Context, what string, do func() error) bool {
	began := time.Now()
	for {
		tried := time.Now()
		err := do()
		if err == nil {
			return true
		}
		if ctx.Err() != nil {
			return false
		}
		if !k.disturbedSince(tried) {
			k.report.fault("%s: %v", what, err)
			return false
		}
		k.report.excused()
		if time.Since(began) > insistLimit {
			k.report.fault("%s: still fails %v after its first try: %v", what, insistLimit, err)
			return false
		}
		pause(ctx, time.Second)
	}
}

// disturbedSince reports whether a program was down, or came back a moment ago, at any time since t.
func (k *soak) disturbedSince(t time.Time) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.broken > 0 || (!k.mendedT.IsZero() && t.Before(k.mendedT.Add(comeBack)))
}

func (k *soak) disturb(by int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.broken += by
	if by < 0 {
		k.mendedT = time.Now()
	}
}

// withFaults kills gateway and agent at random times while workspaces come and go.
func (k *soak) withFaults(ctx context.Context, d time.Duration, c *counter) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	end := time.Now().Add(d)
	done := make(chan error, 1)
	go func() { done <- k.churn(ctx, d) }()
	var err error
	for err == nil && time.Now().Before(end) {
		pause(ctx, time.Duration((0.5+k.random.Float64())*float64(k.setup.kill)))
		if ctx.Err() != nil {
			break
		}
		err = k.kill(ctx, c)
	}
	if err != nil {
		stop() // a program did not come back: nothing more to learn
	}
	return errors.Join(err, <-done)
}

// kill ends one or both programs as kill -9 does, starts them again after a while, and checks that the steady workspace
// is adopted in time.
func (k *soak) kill(ctx context.Context, c *counter) error {
	which := k.random.IntN(3)
	away := time.Duration(k.random.Float64() * float64(5*time.Second))
	gateway := which != 1 || k.carrel.Layout == rig.Dev
	agent := which != 0 && k.carrel.Layout != rig.Dev
	k.disturb(1)
	defer k.disturb(-1)
	if gateway {
		k.carrel.Gateway.Kill()
	}
	if agent {
		k.carrel.Agent.Kill()
	}
	pause(ctx, away)
	if gateway {
		if err := k.carrel.StartGateway(ctx); err != nil {
			return err
		}
	}
	if agent {
		if err := k.carrel.StartAgent(); err != nil {
			return err
		}
	}
	back := time.Now()
	err := rig.Poll(ctx, 6*adoptLimit, func(ctx context.Context) (bool, error) { return c.reachable(ctx), nil })
	took := time.Since(back)
	k.report.killed(gateway, agent, took)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		k.report.fault("%s is not reachable %v after gateway=%t agent=%t were started again", steady, 6*adoptLimit, gateway, agent)
		return nil
	}
	if took > adoptLimit {
		k.report.fault("%s was adopted %.1f s after gateway=%t agent=%t were started again, not within %v", steady, took.Seconds(), gateway, agent, adoptLimit)
	}
	c.check(ctx)
	return nil
}

// ledger checks that the steady workspace has one unbroken lease.
func (k *soak) ledger(ctx context.Context) {
	w, err := k.carrel.Show(ctx, steady)
	if err != nil {
		k.report.fault("show %s: %v", steady, err)
		return
	}
	if len(w.Leases) != 1 || w.Leases[0].EndedAt != nil {
		k.report.fault("%s should have one lease that never ended, and has %+v", steady, w.Leases)
	}
}

// end removes everything and looks for what is left.
func (k *soak) end(ctx context.Context) error {
	left, err := k.carrel.RemoveAll(ctx, k.engine)
	for _, l := range left {
		k.report.fault("left behind after rm: %s", l)
	}
	return errors.Join(err, k.carrel.Stop())
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
