package gpu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// DefaultDeviceLimit is how long a driver may take over one GPU before it counts as hanging (R-21 of the fault list).
const DefaultDeviceLimit = 5 * time.Second

// IsolateConfig sets up Isolate.
type IsolateConfig struct {
	// Limit bounds every question to the driver; default DefaultDeviceLimit.
	Limit time.Duration
	// Now is the clock.
	Now func() time.Time
}

// Isolate makes a source of a driver: each GPU is asked on a goroutine of its own and within a limit, so that one that
// hangs, fails or is lost hides no other. A question that hangs cannot be cancelled: its goroutine and thread stay until
// the driver answers, at most three per GPU, and the GPU is not asked the same again until then.
func Isolate(driver Driver, cfg IsolateConfig) Source {
	if cfg.Limit <= 0 {
		cfg.Limit = DefaultDeviceLimit
	}
	return &isolated{driver: driver, cfg: cfg, busy: map[string]*question{}, last: map[int][]Device{}}
}

type isolated struct {
	driver Driver
	cfg    IsolateConfig

	mu     sync.Mutex
	busy   map[string]*question
	last   map[int][]Device // by index: what the last good answer said, only to name a GPU that no longer answers
	leaves []string         // UUIDs of whole GPUs in the last inventory, in its order
}

var _ Source = (*isolated)(nil)

// question is one call in the driver.
type question struct {
	since  time.Time
	done   chan struct{}
	answer any
	err    error
}

// errHanging is a driver that has not answered within the limit.
var errHanging = errors.New("no answer")

// ask runs fn unless the same question is still open; then it waits for that one's answer.
func ask[T any](ctx context.Context, s *isolated, key string, fn func() (T, error)) (T, error) {
	var zero T
	now := s.cfg.Now()
	s.mu.Lock()
	q, open := s.busy[key]
	if !open {
		q = &question{since: now, done: make(chan struct{})}
		s.busy[key] = q
		go func() {
			answer, err := fn()
			q.answer, q.err = answer, err
			s.mu.Lock()
			delete(s.busy, key)
			s.mu.Unlock()
			close(q.done)
		}()
	}
	s.mu.Unlock()

	left := s.cfg.Limit - now.Sub(q.since)
	if left < 0 {
		left = 0
	}
	timer := time.NewTimer(left)
	defer timer.Stop()
	select {
	case <-q.done:
	case <-timer.C:
		return zero, fmt.Errorf("the driver gives %w since %s (limit %s)", errHanging,
			q.since.UTC().Format(time.RFC3339), s.cfg.Limit)
	case <-ctx.Done():
		return zero, ctx.Err()
	}
	if q.err != nil {
		return zero, q.err
	}
	answer, ok := q.answer.(T)
	if !ok {
		return zero, fmt.Errorf("question %q answered with %T", key, q.answer)
	}
	return answer, nil
}

func (s *isolated) Inventory(ctx context.Context) (Inventory, error) {
	inv := Inventory{Source: s.driver.Kind(), At: s.cfg.Now()}
	host, err := ask(ctx, s, "host", s.driver.Host)
	if ctx.Err() != nil {
		return Inventory{}, ctx.Err()
	}
	if err != nil {
		inv.Problem = err.Error()
		var restart interface{ RestartNeeded() bool }
		inv.RestartNeeded = errors.As(err, &restart) && restart.RestartNeeded()
		return inv, nil
	}
	inv.DriverVersion, inv.CUDAVersion = host.DriverVersion, host.CUDAVersion
	answers := s.askAll(ctx, host.Count)
	if ctx.Err() != nil {
		return Inventory{}, ctx.Err()
	}
	s.assemble(&inv, answers)
	return inv, nil
}

type deviceAnswer struct {
	devices []Device
	err     error
}

func (s *isolated) askAll(ctx context.Context, count int) []deviceAnswer {
	answers := make([]deviceAnswer, count)
	var wg sync.WaitGroup
	for i := range count {
		wg.Go(func() {
			devices, err := ask(ctx, s, fmt.Sprintf("device %d", i), func() ([]Device, error) { return s.driver.Device(i) })
			if err == nil && len(devices) == 0 {
				err = errors.New("no device at this index")
			}
			answers[i] = deviceAnswer{devices: devices, err: err}
		})
	}
	wg.Wait()
	return answers
}

// assemble puts the answers together. A GPU that gave none is shown as what the last good answer at its index said,
// unless that GPU has answered at another index meanwhile.
func (s *isolated) assemble(inv *Inventory, answers []deviceAnswer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	seen := map[string]bool{}
	for _, a := range answers {
		if a.err == nil {
			seen[a.devices[0].UUID] = true
		}
	}
	var problems []string
	s.leaves = nil
	next := map[int][]Device{}
	for i, a := range answers {
		devices := a.devices
		if a.err != nil {
			devices = s.failed(i, a.err, inv.At, seen)
			if devices == nil {
				problems = append(problems, fmt.Sprintf("GPU %d cannot be identified: %v", i, a.err))
				continue
			}
		}
		seen[devices[0].UUID] = true
		next[i] = devices
		s.leaves = append(s.leaves, devices[0].UUID)
		inv.Devices = append(inv.Devices, devices...)
	}
	s.last = next
	inv.Problem = strings.Join(problems, "; ")
}

// failed returns the GPU at index as last known, failed for the reason, or nil where it was never known. The caller
// holds the lock.
func (s *isolated) failed(index int, err error, at time.Time, seen map[string]bool) []Device {
	known := s.last[index]
	var de *DeviceError
	named := errors.As(err, &de) && de.UUID != ""
	if named && (len(known) == 0 || known[0].UUID != de.UUID) {
		known = []Device{{UUID: de.UUID, Index: index, Kind: KindGPU}}
		for _, devices := range s.last {
			if devices[0].UUID == de.UUID {
				known = devices
			}
		}
	}
	if len(known) == 0 || seen[known[0].UUID] {
		return nil
	}
	devices := slices.Clone(known)
	for i := range devices {
		d := &devices[i]
		since := at
		if d.Health.State != Healthy && !d.Health.Since.IsZero() {
			since = d.Health.Since
		}
		d.Health = Health{State: Failed, Reason: err.Error(), Since: since}
		if de != nil && de.Lost {
			d.Health.State = Lost
		}
		d.Processes = nil
	}
	return devices
}

func (s *isolated) Sample(ctx context.Context) ([]Sample, error) {
	s.mu.Lock()
	uuids := slices.Clone(s.leaves)
	members := map[string][]string{}
	for _, devices := range s.last {
		for _, d := range devices {
			members[devices[0].UUID] = append(members[devices[0].UUID], d.UUID)
		}
	}
	s.mu.Unlock()
	if len(uuids) == 0 {
		return nil, ctx.Err()
	}

	answers := make([][]Sample, len(uuids))
	var faults []Fault
	var wg sync.WaitGroup
	for i, uuid := range uuids {
		wg.Go(func() {
			samples, err := ask(ctx, s, "sample "+uuid, func() ([]Sample, error) { return s.driver.Sample(uuid) })
			answers[i] = complete(samples, err, members[uuid], s.cfg.Now())
		})
	}
	wg.Go(func() {
		// A driver that cannot report faults is not a failure: health then rests on the questions themselves.
		faults, _ = ask(ctx, s, "faults", s.driver.Faults)
	})
	wg.Wait()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return withFaults(slices.Concat(answers...), faults, s.cfg.Now()), nil
}

// complete gives each member that the driver said nothing of a failed sample.
func complete(samples []Sample, err error, members []string, now time.Time) []Sample {
	reason := "no sample"
	if err != nil {
		reason = err.Error()
		samples = nil
	}
	for _, uuid := range members {
		if !slices.ContainsFunc(samples, func(x Sample) bool { return x.UUID == uuid }) {
			samples = append(samples, FailedSample(uuid, reason, now))
		}
	}
	return samples
}

func withFaults(samples []Sample, faults []Fault, now time.Time) []Sample {
	for _, f := range faults {
		i := slices.IndexFunc(samples, func(x Sample) bool { return x.UUID == f.UUID })
		if i < 0 {
			samples = append(samples, FailedSample(f.UUID, "no sample", now))
			i = len(samples) - 1
		}
		samples[i].Faults = append(samples[i].Faults, f)
	}
	return samples
}

// Close closes the driver. It waits no longer than the limit for a driver that hangs.
func (s *isolated) Close() error {
	_, err := ask(context.Background(), s, "close", func() (struct{}, error) { return struct{}{}, s.driver.Close() })
	return err
}
