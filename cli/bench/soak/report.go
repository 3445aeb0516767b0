//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/carrel-dev/carrel/cli/bench/rig"
)

// look is what the programs hold at one quiet moment.
type look struct {
	at         time.Time
	parts      map[string]rig.Cost
	goroutines float64 // of the gateway, as the next; -1 where there are no metrics
	heapMiB    float64 // live and not yet collected objects
}

func (k *soak) look(ctx context.Context) (look, error) {
	pause(ctx, settle)
	m := metrics(ctx, k.carrel.MetricsURL, "go_goroutines", "go_memstats_heap_alloc_bytes")
	l := look{at: time.Now(), parts: map[string]rig.Cost{}, goroutines: m[0], heapMiB: m[1] / (1 << 20)}
	for name, p := range map[string]*rig.Process{"gateway": k.carrel.Gateway, "agent": k.carrel.Agent} {
		if name == "agent" && k.carrel.Layout == rig.Dev {
			continue
		}
		c, err := rig.Measure(p.PID())
		if err != nil {
			return l, fmt.Errorf("%s: %w", name, err)
		}
		l.parts[name] = c
	}
	return l, nil
}

// metrics reads some values of a Prometheus text; those that are not there are -1.
func metrics(ctx context.Context, url string, names ...string) []float64 {
	values := make([]float64, len(names))
	for i := range values {
		values[i] = -1
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return values
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return values
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return values
	}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if i := slices.Index(names, name); i >= 0 {
			if n, err := strconv.ParseFloat(value, 64); err == nil {
				values[i] = n
			}
		}
	}
	return values
}

// What may be more after the quiet half than before: pools and caches move a little, a leak grows with each cycle.
const (
	moreDescriptors = 8
	moreGoroutines  = 16
	morePSSKiB      = 8 << 10
	morePSSShare    = 0.25
)

// report collects what happened.
type report struct {
	setup   setup
	machine rig.Machine
	began   time.Time

	mu       sync.Mutex
	cycles   int
	retries  int
	kills    map[string]int
	adopted  []float64 // seconds
	growth   []string
	faults   []string
	maxLines int
}

func newReport(s setup, m rig.Machine) *report {
	return &report{setup: s, machine: m, began: time.Now(), kills: map[string]int{}, maxLines: 50}
}

func (r *report) say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "[soak %.0f s] %s\n", time.Since(r.began).Seconds(), fmt.Sprintf(format, args...))
}

func (r *report) fault(format string, args ...any) {
	text := strings.TrimSpace(fmt.Sprintf(format, args...))
	r.say("FAULT: %s", text)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.faults = append(r.faults, fmt.Sprintf("%.0f s: %s", time.Since(r.began).Seconds(), strings.ReplaceAll(text, "\n", "; ")))
}

func (r *report) cycle() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cycles++
	if r.cycles%20 == 0 {
		r.say("%d workspaces lived and went", r.cycles)
	}
}

func (r *report) excused() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.retries++
}

func (r *report) killed(gateway, agent bool, adopted time.Duration) {
	name := "agent"
	switch {
	case gateway && agent:
		name = "gateway and agent"
	case gateway:
		name = "gateway"
	}
	r.say("killed %s; reachable again %.1f s after the start", name, adopted.Seconds())
	r.mu.Lock()
	defer r.mu.Unlock()
	r.kills[name]++
	r.adopted = append(r.adopted, adopted.Seconds())
}

// compare looks for growth over the quiet half.
func (r *report) compare(before, after look, cycles int) {
	for name, a := range after.parts {
		b := before.parts[name]
		r.growth = append(r.growth, fmt.Sprintf("| %s | %.1f → %.1f | %.1f → %.1f | %d → %d | %d → %d |",
			name, b.RSSKiB/1024, a.RSSKiB/1024, b.PSSKiB/1024, a.PSSKiB/1024, b.Descriptors, a.Descriptors, b.Threads, a.Threads))
		if a.Descriptors > b.Descriptors+moreDescriptors {
			r.fault("%s has %d descriptors after %d workspaces, %d before: a leak", name, a.Descriptors, cycles, b.Descriptors)
		}
		if a.PSSKiB > b.PSSKiB*(1+morePSSShare)+morePSSKiB {
			r.fault("%s holds %.0f KiB after %d workspaces, %.0f before: a leak", name, a.PSSKiB, cycles, b.PSSKiB)
		}
	}
	slices.Sort(r.growth)
	if after.goroutines > before.goroutines+moreGoroutines && before.goroutines >= 0 {
		r.fault("the gateway has %.0f goroutines after %d workspaces, %.0f before: a leak", after.goroutines, cycles, before.goroutines)
	}
	r.growth = append(r.growth, "", fmt.Sprintf("%d workspaces in %v; the gateway's goroutines %.0f → %.0f, its heap %.1f → %.1f MiB.",
		cycles, after.at.Sub(before.at).Round(time.Second), before.goroutines, after.goroutines, before.heapMiB, after.heapMiB))
}

// finish writes the report; faults are an error.
func (r *report) finish(out io.Writer) error {
	text := r.markdown()
	if _, err := io.WriteString(out, text); err != nil {
		return err
	}
	if r.setup.report != "" {
		if err := os.WriteFile(r.setup.report, []byte(text), 0o644); err != nil {
			return err
		}
	}
	if n := len(r.faults); n > 0 {
		return fmt.Errorf("%d faults (above)", n)
	}
	if r.cycles == 0 {
		return errors.New("no workspace lived through a whole cycle, so that nothing was shown")
	}
	return nil
}

func (r *report) markdown() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("# Soak report\n\nWritten by `make soak`; see [performance.md](performance.md) for what it does.\n")
	line("%s.\n", r.machine)
	line("Layout %s, %d workers, %v, seed %d: %d workspaces lived through up, ssh, stop, start, ssh, rm.", r.setup.layout, r.setup.workers, time.Since(r.began).Round(time.Second), r.setup.seed, r.cycles)
	line("\n## Quiet half: what the programs hold before and after\n\n| program | RSS MiB | Pss MiB | descriptors | threads |\n|---|---|---|---|---|")
	line("%s", strings.Join(r.growth, "\n"))
	line("\n## Half with `kill -9` at random times\n")
	for _, name := range []string{"gateway", "agent", "gateway and agent"} {
		line("- %s: %d times", name, r.kills[name])
	}
	if len(r.adopted) > 0 {
		slices.Sort(r.adopted)
		line("\nThe steady workspace was reachable by ssh again %.1f s (median; longest %.1f s) after the restart. %d tries of verbs were repeated while a program was down.",
			r.adopted[len(r.adopted)/2], r.adopted[len(r.adopted)-1], r.retries)
	}
	line("\n## Faults\n")
	for _, f := range r.faults[:min(len(r.faults), r.maxLines)] {
		line("- %s", f)
	}
	if len(r.faults) > r.maxLines {
		line("- and %d more", len(r.faults)-r.maxLines)
	}
	if len(r.faults) == 0 {
		line("None.")
	}
	return b.String()
}
