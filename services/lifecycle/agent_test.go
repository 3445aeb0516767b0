package lifecycle_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// agents is lifecycle.Hosts over agents that behave, in memory, on the time of the test.
type agents struct {
	now func() time.Time

	mu   sync.Mutex
	byID map[fleet.HostID]*agent
}

// agent makes its machine match what it is told, and keeps a journal of what it saw, as D3 says.
type agent struct {
	id   fleet.HostID
	name string
	now  func() time.Time

	pullTime, startTime, stopTime time.Duration // of each container

	mu         sync.Mutex
	up         bool
	hung       bool // takes calls and never answers
	slow       time.Duration
	link       chan struct{} // closed when the link is lost
	stirred    chan struct{} // closed and renewed when something happened
	stamp      fleet.Stamp
	applies    int
	journal    string
	seq        int64
	acked      int64
	facts      fleet.HostFacts
	containers map[fleet.RunKey]*container
	records    map[fleet.RunKey]*record
	images     map[string]fleet.ResolvedImage
	keys       map[fleet.RunKey]int // keys that a run lets in
	overlap    []string             // devices that two live containers held: I2 broken
}

type container struct {
	devices []fleet.DeviceID
	phase   fleet.Phase
	timers  []*time.Timer
	started time.Time
}

type record struct {
	seq int64
	run fleet.ObservedRun
}

func newAgent(id fleet.HostID, name string, devices int, now func() time.Time) *agent {
	a := &agent{
		id: id, name: name, now: now, pullTime: 0, startTime: 300 * time.Millisecond, stopTime: 500 * time.Millisecond, journal: "j1", link: make(chan struct{}), stirred: make(chan struct{}),
		containers: map[fleet.RunKey]*container{}, records: map[fleet.RunKey]*record{}, keys: map[fleet.RunKey]int{},
		images: map[string]fleet.ResolvedImage{"debian": {Digest: "sha256:d1", Present: true}},
		facts:  fleet.HostFacts{BootID: "b1", AgentVersion: "1", EngineVersion: "20.10", CPUs: 16, MemoryMiB: 65536, DiskFreeMiB: 100000, GPUSource: "simulated"},
	}
	for i := range devices {
		a.facts.Devices = append(a.facts.Devices, fleet.Device{
			ID: fleet.DeviceID(fmt.Sprintf("SIM-%s-%d", name, i)), Index: i, Product: "Simulated 4090", Model: "4090", MemoryMiB: 24564, ComputeCapability: "8.9",
			Kind: fleet.KindGPU, Simulated: true, Present: true, Health: fleet.HealthOK,
		})
	}
	return a
}

func (s *agents) of(id fleet.HostID) *agent {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byID[id]
}

// enter waits as long as the agent takes to answer, and fails when the link is lost meanwhile.
func (s *agents) enter(ctx context.Context, id fleet.HostID) (*agent, error) {
	a := s.of(id)
	a.mu.Lock()
	up, hung, slow, link := a.up, a.hung, a.slow, a.link
	a.mu.Unlock()
	away := fleet.Errorf(fleet.KindUnavailable, "the host does not answer")
	if !up {
		return nil, away
	}
	var done <-chan time.Time
	switch {
	case hung:
	case slow > 0:
		done = time.After(slow)
	default:
		return a, nil
	}
	select {
	case <-done:
		return a, nil
	case <-link:
		return nil, away
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *agents) Apply(ctx context.Context, d fleet.DesiredHost) error {
	a, err := s.enter(ctx, d.Host)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if older(d.Stamp, a.stamp) {
		return fleet.Errorf(fleet.KindConflict, "a newer stamp was seen")
	}
	a.stamp = d.Stamp
	a.applies++
	for _, r := range d.Runs {
		if r.Run.Goal == fleet.GoalRunning {
			a.keys[r.Run.Key] = len(r.Keys)
			a.create(r.Run.Key, r.Run.Devices)
		} else {
			a.remove(r.Run.Key)
		}
	}
	return nil
}

func older(a, b fleet.Stamp) bool {
	return slices.Compare([]int64{a.DatabaseGeneration, a.HostSession, a.Generation}, []int64{b.DatabaseGeneration, b.HostSession, b.Generation}) < 0
}

func (a *agent) create(key fleet.RunKey, devices []fleet.DeviceID) { // a.mu is held, as below
	if a.containers[key] != nil || a.records[key] != nil {
		return // there already, or ended: a name is used once
	}
	for other, c := range a.containers {
		for _, d := range devices {
			if slices.Contains(c.devices, d) {
				a.overlap = append(a.overlap, fmt.Sprintf("%s in %v and %v", d, other, key))
			}
		}
	}
	c := &container{devices: devices}
	a.containers[key] = c
	if a.pullTime > 0 {
		a.phase(key, c, fleet.PhasePulling)
		c.timers = append(c.timers, time.AfterFunc(a.pullTime, func() { a.step(key, c, fleet.PhaseStarting) }))
	} else {
		a.phase(key, c, fleet.PhaseStarting)
	}
	c.timers = append(c.timers, time.AfterFunc(a.pullTime+a.startTime, func() { a.step(key, c, fleet.PhaseReady) }))
}

func (a *agent) remove(key fleet.RunKey) {
	c := a.containers[key]
	if c == nil {
		if a.records[key] == nil {
			a.note(fleet.ObservedRun{Key: key, Phase: fleet.PhaseGone, Reason: fleet.Reason{Code: "stopped"}})
		}
		return
	}
	if c.phase == fleet.PhaseStopping {
		return
	}
	a.phase(key, c, fleet.PhaseStopping)
	time.AfterFunc(a.stopTime, func() { a.end(key, fleet.Reason{Code: "stopped"}) })
}

func (a *agent) step(key fleet.RunKey, c *container, p fleet.Phase) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.containers[key] == c && c.phase != fleet.PhaseStopping {
		a.phase(key, c, p)
	}
}

func (a *agent) phase(key fleet.RunKey, c *container, p fleet.Phase) {
	c.phase = p
	o := fleet.ObservedRun{Key: key, Phase: p, ContainerID: key.ContainerName()}
	if p == fleet.PhaseReady {
		c.started = a.now()
		o.ReadyAt = c.started
	}
	if p == fleet.PhasePulling {
		o.PullDone, o.PullTotal = 10, 100
	}
	o.StartedAt = c.started
	a.note(o)
}

// end ends a container, however it came to that.
func (a *agent) end(key fleet.RunKey, reason fleet.Reason) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.containers[key]
	if c == nil {
		return
	}
	for _, t := range c.timers {
		t.Stop()
	}
	delete(a.containers, key)
	a.note(fleet.ObservedRun{Key: key, Phase: fleet.PhaseGone, ContainerID: key.ContainerName(), StartedAt: c.started, EndedAt: a.now(), Reason: reason})
}

// note writes into the journal and wakes who observes.
func (a *agent) note(o fleet.ObservedRun) {
	a.seq++
	a.records[o.Key] = &record{a.seq, o}
	close(a.stirred)
	a.stirred = make(chan struct{})
}

func (s *agents) Observe(ctx context.Context, id fleet.HostID, after int64, each func(fleet.Observation) error) error {
	a, err := s.enter(ctx, id)
	if err != nil {
		return err
	}
	a.mu.Lock()
	a.acked = max(a.acked, after)
	a.mu.Unlock()
	end := time.After(10 * time.Second)
	for first := true; ; first = false {
		o, stirred, link := a.batch(after, first)
		if first || len(o.Runs) > 0 {
			if err := each(o); err != nil {
				return err
			}
			after = o.Seq
		}
		select {
		case <-stirred:
		case <-end:
			return nil
		case <-link:
			return fleet.Errorf(fleet.KindUnavailable, "the link was lost")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (a *agent) batch(after int64, first bool) (o fleet.Observation, stirred, link chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	o = fleet.Observation{Host: a.id, JournalID: a.journal, Seq: a.seq, Complete: first}
	if first {
		facts := a.facts
		o.Facts = &facts
	}
	var records []*record
	for _, r := range a.records {
		if r.seq > after {
			records = append(records, r)
		}
	}
	slices.SortFunc(records, func(x, y *record) int { return int(x.seq - y.seq) })
	for _, r := range records {
		o.Runs = append(o.Runs, r.run)
	}
	return o, a.stirred, a.link
}

func (s *agents) Sample(ctx context.Context, id fleet.HostID) ([]fleet.Sample, error) {
	a, err := s.enter(ctx, id)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []fleet.Sample
	for _, d := range a.facts.Devices {
		busy := 50
		out = append(out, fleet.Sample{Device: d.ID, At: a.now(), UtilizationPercent: &busy})
	}
	return out, nil
}

func (s *agents) ResolveImage(ctx context.Context, id fleet.HostID, reference string) (fleet.ResolvedImage, error) {
	a, err := s.enter(ctx, id)
	if err != nil {
		return fleet.ResolvedImage{}, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if image, ok := a.images[reference]; ok {
		return image, nil
	}
	return fleet.ResolvedImage{}, fleet.Errorf(fleet.KindNotFound, "no such image")
}

// live returns the containers that are there.
func (a *agent) live() []fleet.RunKey {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []fleet.RunKey
	for key := range a.containers {
		out = append(out, key)
	}
	return out
}

func (a *agent) set(change func(*agent)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change(a)
}
