//go:build linux

package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"math"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/carrel-dev/carrel/cli/bench/rig"
)

// leg is one kind of transfer.
type leg struct {
	name string
	scp  bool
	up   bool
	// Targets for a ProxyCommand with pipes, on plain legs and with TLS on both.
	plain, tls float64
}

func legs() []leg {
	return []leg{
		{name: "upload, ssh cat", up: true, plain: 0.75, tls: 0.50},
		{name: "download, ssh cat", plain: 0.80, tls: 0.55},
		{name: "upload, scp", scp: true, up: true, plain: 0.70, tls: 0.50},
		{name: "download, scp", scp: true, plain: 0.70, tls: 0.50},
	}
}

func (l leg) target(layout rig.Layout) float64 {
	if layout == rig.SplitTLS {
		return l.tls
	}
	return l.plain
}

// transfer is what one leg took, by round.
type transfer struct {
	seconds, cpu []float64
	others       []float64 // cores that programs of others had meanwhile
}

// copyBench moves random bytes over several paths in turn.
type copyBench struct {
	meter   *rig.Meter
	also    []int // processes whose control groups count too: the workspace's container
	payload string
	bytes   int64
	took    map[string]map[string]*transfer // leg, path
	session map[string][]float64            // path: seconds of `ssh true`
	done    int                             // whole rounds
}

// newCopyBench writes the payload into dir, which is best in memory.
func newCopyBench(meter *rig.Meter, dir string, bytes int64) (*copyBench, error) {
	c := &copyBench{
		meter: meter, payload: filepath.Join(dir, "payload"), bytes: bytes,
		took: map[string]map[string]*transfer{}, session: map[string][]float64{},
	}
	f, err := os.OpenFile(c.payload, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	if _, err := io.CopyN(f, rand.Reader, bytes); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("write %d bytes of payload to %s (a smaller -size, or another -dir, helps where there is no room): %w", bytes, c.payload, err)
	}
	return c, f.Close()
}

const (
	remoteSource = "carrel-bench-source"
	remoteSink   = "carrel-bench-sink"
)

// warm puts the download's source behind a path, and checks that it arrived as it was sent: a fast path that loses bytes
// is no result.
func (c *copyBench) warm(ctx context.Context, p rig.Path) error {
	run := rig.Run{Env: p.Env}
	source := path.Join(p.Dir, remoteSource)
	if _, _, err := run.Do(ctx, p.SCP(c.payload, p.Remote(source))); err != nil {
		return err
	}
	there, _, err := run.Do(ctx, p.SSH("sha256sum", source))
	if err != nil {
		return err
	}
	here, _, err := rig.Run{}.Do(ctx, []string{"sha256sum", c.payload})
	if err != nil {
		return err
	}
	if t, h := strings.Fields(there), strings.Fields(here); len(t) == 0 || len(h) == 0 || t[0] != h[0] {
		return fmt.Errorf("%s: what arrived is not what was sent: sha256 %q, not %q", p.Name, there, here)
	}
	return nil
}

// clean removes what warm and the legs left behind a path.
func (c *copyBench) clean(ctx context.Context, p rig.Path) error {
	_, _, err := rig.Run{Env: p.Env}.Do(ctx, p.SSH("rm", "-f", path.Join(p.Dir, remoteSource), path.Join(p.Dir, remoteSink)))
	return err
}

func (c *copyBench) rounds(ctx context.Context, paths []rig.Path, legs []leg, rounds int, calm func(context.Context) error, say func(string, ...any)) error {
	for round := range rounds {
		if err := calm(ctx); err != nil {
			return err
		}
		for _, p := range rotated(paths, round) {
			_, took, err := rig.Run{Env: p.Env}.Do(ctx, p.SSH("true"))
			if err != nil {
				return err
			}
			c.session[p.Name] = append(c.session[p.Name], took.Seconds())
		}
		for _, l := range legs {
			for _, p := range rotated(paths, round) {
				if err := c.one(ctx, p, l); err != nil {
					return err
				}
			}
		}
		c.done++
		say("round %d of %d", round+1, rounds)
	}
	return nil
}

func (c *copyBench) one(ctx context.Context, p rig.Path, l leg) error {
	run, argv := c.command(p, l)
	before, err := c.cpu()
	if err != nil {
		return err
	}
	_, took, err := run.Do(ctx, argv)
	if err != nil {
		return err
	}
	after, err := c.cpu()
	if err != nil {
		return err
	}
	if c.took[l.name] == nil {
		c.took[l.name] = map[string]*transfer{}
	}
	t := c.took[l.name][p.Name]
	if t == nil {
		t = &transfer{}
		c.took[l.name][p.Name] = t
	}
	t.seconds = append(t.seconds, took.Seconds())
	t.cpu = append(t.cpu, (after.ours - before.ours).Seconds())
	t.others = append(t.others, (after.all-before.all-after.ours+before.ours).Seconds()/took.Seconds())
	return nil
}

// cpuTime is what was used since the machine started: by what is measured, and by everything.
type cpuTime struct{ ours, all time.Duration }

// cpu is 0 where it cannot be counted.
func (c *copyBench) cpu() (t cpuTime, err error) {
	if c.meter == nil {
		return cpuTime{}, nil
	}
	if t.all, err = rig.Busy(); err != nil {
		return t, err
	}
	t.ours, err = c.meter.Used(c.also...)
	return t, err
}

// command reads from and writes to files, so that no byte passes this program.
func (c *copyBench) command(p rig.Path, l leg) (rig.Run, []string) {
	run := rig.Run{Env: p.Env}
	source, sink := path.Join(p.Dir, remoteSource), path.Join(p.Dir, remoteSink)
	switch {
	case l.scp && l.up:
		return run, p.SCP(c.payload, p.Remote(sink))
	case l.scp:
		return run, p.SCP(p.Remote(source), c.payload+".back")
	case l.up:
		run.In = c.payload
		return run, p.SSH("cat > /dev/null")
	default:
		run.Out = os.DevNull
		return run, p.SSH("cat " + source)
	}
}

// rows compares one path with another over all legs.
func (c *copyBench) rows(legs []leg, layout rig.Layout, subject, peer string) []row {
	size := fmt.Sprintf("%d MiB", c.bytes>>20)
	bench := "copy " + string(layout)
	rows := []row{sessionRow(bench, c.session, subject, peer)}
	for _, l := range legs {
		s, p := c.took[l.name][subject], c.took[l.name][peer]
		speed := ratios(p.seconds, s.seconds)
		r := row{
			Bench: bench, What: fmt.Sprintf("%s %s, speed against %s", size, l.name, peer), Ratio: median(speed),
			Target: l.target(layout), Better: higher,
			Subject: c.rate(s), Peer: c.rate(p),
			Note: c.withoutSession(s, p, subject, peer),
		}
		if peer != "direct" {
			r.Target = 1 // as many hops as ours, without sign-in or routing: to be beaten in every column
		}
		if c.meter != nil {
			r.CPU = median(ratios(s.cpu, p.cpu))
			r.Note += fmt.Sprintf("; others used %.1f cores", median(append(s.others, p.others...)))
		}
		rows = append(rows, r.within(speed))
	}
	return rows
}

func sessionRow(bench string, session map[string][]float64, subject, peer string) row {
	each := ratios(session[subject], session[peer])
	return row{
		Bench: bench, What: "a whole session (`ssh true`), time against " + peer, Ratio: median(each),
		Subject: fmt.Sprintf("%.0f ms", 1000*median(session[subject])), Peer: fmt.Sprintf("%.0f ms", 1000*median(session[peer])),
	}.within(each)
}

// withoutSession is the same ratio for the bytes alone. Where setting the session up was most of the time, there is none.
func (c *copyBench) withoutSession(s, p *transfer, subject, peer string) string {
	ours, theirs := median(s.seconds), median(p.seconds)
	oursNet, theirsNet := ours-median(c.session[subject]), theirs-median(c.session[peer])
	if oursNet < ours/4 || theirsNet < theirs/4 {
		return "too short to tell bytes from the session's set-up"
	}
	return fmt.Sprintf("without the session's set-up %.2f", theirsNet/oursNet)
}

func (c *copyBench) rate(t *transfer) string {
	text := fmt.Sprintf("%.0f MB/s", float64(c.bytes)/1e6/median(t.seconds))
	if c.meter != nil {
		text += fmt.Sprintf(", %.1f CPU-s/GiB", median(t.cpu)*math.Exp2(30)/float64(c.bytes))
	}
	return text
}
