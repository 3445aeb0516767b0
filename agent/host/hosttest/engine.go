// Package hosttest holds a container engine in memory, and the contract that it and a real one keep.
package hosttest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/carrel-dev/carrel/agent/host"
)

// Engine is a container engine in memory.
type Engine struct {
	now func() time.Time

	mu         sync.Mutex
	containers map[string]*box // by id
	images     map[string]host.Image
	registry   map[string]*Remote
	volumes    map[string]string
	listeners  map[chan host.Event]bool
	past       []host.Event
	changed    chan struct{}
	calls      []string
	before     func(call string) error
	after      func(call string) error
	onStart    func(name string) // called without the lock
	probe      host.ProbeResult
	nextPID    int
	stubborn   bool
}

type box struct {
	host.Container
	spec host.Spec
	logs []string
}

// Remote is an image in a registry.
type Remote struct {
	Image  host.Image
	Digest string
	// Feed, when set, runs in place of the transfer.
	Feed func(ctx context.Context, each func(host.PullProgress)) error
}

var _ host.Runtime = (*Engine)(nil)

// NewEngine makes an engine whose wall clock is now.
func NewEngine(now func() time.Time) *Engine {
	return &Engine{
		now: now, containers: map[string]*box{}, images: map[string]host.Image{}, registry: map[string]*Remote{},
		volumes: map[string]string{}, listeners: map[chan host.Event]bool{}, changed: make(chan struct{}), nextPID: 1000,
	}
}

// Fail sets what every call goes through: an error of before replaces the call, one of after its answer. Either may be nil.
func (e *Engine) Fail(before, after func(call string) error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.before, e.after = before, after
}

// OnStart is called after each start, without the engine's lock.
func (e *Engine) OnStart(f func(name string)) { e.locked(func() { e.onStart = f }) }

// SetProbe sets what Probe answers; what it says of GPUs, only to who asks with a device.
func (e *Engine) SetProbe(r host.ProbeResult) { e.locked(func() { e.probe = r }) }

// SetStubborn makes containers outlive Stop.
func (e *Engine) SetStubborn(on bool) { e.locked(func() { e.stubborn = on }) }

// AddImage gives the engine an image under references.
func (e *Engine) AddImage(image host.Image, refs ...string) {
	e.locked(func() {
		e.images[image.ID] = image
		for _, r := range refs {
			e.images[r] = image
		}
	})
}

// AddRemote gives the registry an image under references.
func (e *Engine) AddRemote(r *Remote, refs ...string) {
	e.locked(func() {
		for _, ref := range refs {
			e.registry[ref] = r
		}
	})
}

// Calls returns the names of the calls so far.
func (e *Engine) Calls() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.calls)
}

// Names returns the names of all containers.
func (e *Engine) Names() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []string
	for _, b := range e.containers {
		out = append(out, b.Name)
	}
	slices.Sort(out)
	return out
}

// Spec returns what a container was made of.
func (e *Engine) Spec(name string) (host.Spec, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	b := e.find(name)
	if b == nil {
		return host.Spec{}, false
	}
	return b.spec, true
}

// Exit ends a container's first process.
func (e *Engine) Exit(name string, code int, outOfMemory bool, lines ...string) {
	e.locked(func() {
		if b := e.find(name); b != nil && b.State.Running() {
			b.logs = append(b.logs, lines...)
			b.OutOfMemory = outOfMemory
			e.exit(b, code)
		}
	})
}

// Vanish removes a container, as somebody else would with docker rm -f.
func (e *Engine) Vanish(name string) {
	e.locked(func() {
		if b := e.find(name); b != nil {
			e.destroy(b)
		}
	})
}

// Restart ends and starts a container, as somebody else would.
func (e *Engine) Restart(name string) {
	e.locked(func() {
		if b := e.find(name); b != nil {
			e.exit(b, 143)
			e.start(b)
		}
	})
}

// Put adds a container of somebody else.
func (e *Engine) Put(c host.Container) {
	e.locked(func() {
		if c.ID == "" {
			c.ID = newID()
		}
		e.containers[c.ID] = &box{Container: c}
	})
}

// LoseEvents breaks all event streams and forgets what was not read.
func (e *Engine) LoseEvents() {
	e.locked(func() {
		e.past = nil
		for c := range e.listeners {
			close(c)
			delete(e.listeners, c)
		}
	})
}

func (e *Engine) locked(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f()
}

func (e *Engine) enter(ctx context.Context, call string) error {
	e.mu.Lock()
	e.calls = append(e.calls, call)
	before := e.before
	e.mu.Unlock()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if before != nil {
		return before(call)
	}
	return nil
}

func (e *Engine) leave(call string) error {
	e.mu.Lock()
	after := e.after
	e.mu.Unlock()
	if after != nil {
		return after(call)
	}
	return nil
}

// act is one call with its faults.
func (e *Engine) act(ctx context.Context, call string, f func() error) error {
	if err := e.enter(ctx, call); err != nil {
		return err
	}
	e.mu.Lock()
	err := f()
	e.mu.Unlock()
	if err != nil {
		return err
	}
	return e.leave(call)
}

func (e *Engine) find(idOrName string) *box {
	if b := e.containers[idOrName]; b != nil {
		return b
	}
	for _, b := range e.containers {
		if b.Name == idOrName {
			return b
		}
	}
	return nil
}

func notFound(what string) error { return host.Errorf(host.KindNotFound, "no such %s", what) }

// Info implements [host.Engine].
func (e *Engine) Info(ctx context.Context) (info host.EngineInfo, err error) {
	err = e.act(ctx, "Info", func() error {
		info = host.EngineInfo{Version: "24.0.0", API: "1.43", OS: "in memory", CPUs: 8, Memory: 64 << 30}
		return nil
	})
	return info, err
}

// Probe implements [host.Engine].
func (e *Engine) Probe(ctx context.Context, p host.ProbeRequest) (r host.ProbeResult, err error) {
	err = e.act(ctx, "Probe", func() error { r = e.probe; return nil })
	if p.Device == "" {
		r.GPU = ""
	}
	return r, err
}

// Create implements [host.Containers].
func (e *Engine) Create(ctx context.Context, spec host.Spec) (id string, err error) {
	err = e.act(ctx, "Create", func() error {
		name := spec.Key.Container()
		if e.find(name) != nil {
			return host.Errorf(host.KindConflict, "the name %s is in use", name)
		}
		image, ok := e.images[spec.Image]
		if !ok {
			return notFound("image " + spec.Image)
		}
		labels := maps.Clone(image.Labels)
		if labels == nil {
			labels = map[string]string{}
		}
		maps.Copy(labels, spec.Labels)
		id = newID()
		e.containers[id] = &box{Container: host.Container{ID: id, Name: name, State: host.StateCreated, Labels: labels}, spec: spec}
		return nil
	})
	if err != nil {
		return "", err
	}
	return id, nil
}

// Start implements [host.Containers].
func (e *Engine) Start(ctx context.Context, id string) error {
	var started string
	err := e.act(ctx, "Start", func() error {
		b := e.find(id)
		if b == nil {
			return notFound("container " + id)
		}
		if !b.State.Running() {
			e.start(b)
			started = b.Name
		}
		return nil
	})
	e.mu.Lock()
	hook := e.onStart
	e.mu.Unlock()
	if hook != nil && started != "" {
		hook(started)
	}
	return err
}

func (e *Engine) start(b *box) {
	e.nextPID++
	b.State, b.PID, b.StartedAt, b.ExitCode = host.StateRunning, e.nextPID, e.now(), 0
	e.tell(host.Event{Kind: host.EventOther, ID: b.ID, At: b.StartedAt})
}

func (e *Engine) exit(b *box, code int) {
	if !b.State.Running() {
		return
	}
	b.State, b.PID, b.FinishedAt, b.ExitCode = host.StateExited, 0, e.now(), code
	if b.OutOfMemory {
		e.tell(host.Event{Kind: host.EventOOM, ID: b.ID, At: b.FinishedAt})
	}
	e.tell(host.Event{Kind: host.EventDie, ID: b.ID, At: b.FinishedAt, ExitCode: code})
}

func (e *Engine) destroy(b *box) {
	e.exit(b, 137)
	delete(e.containers, b.ID)
	e.tell(host.Event{Kind: host.EventDestroy, ID: b.ID, At: e.now()})
}

func (e *Engine) tell(ev host.Event) {
	e.past = append(e.past, ev)
	for c := range e.listeners {
		select {
		case c <- ev:
		default: // a slow reader loses events, as with a real engine
		}
	}
}

// Stop implements [host.Containers].
func (e *Engine) Stop(ctx context.Context, id string, _ time.Duration) error {
	return e.act(ctx, "Stop", func() error {
		b := e.find(id)
		if b == nil {
			return notFound("container " + id)
		}
		if !e.stubborn {
			e.exit(b, 0)
		}
		return nil
	})
}

// Remove implements [host.Containers].
func (e *Engine) Remove(ctx context.Context, id string) error {
	return e.act(ctx, "Remove", func() error {
		if b := e.find(id); b != nil {
			e.destroy(b)
		}
		return nil
	})
}

// Inspect implements [host.Containers].
func (e *Engine) Inspect(ctx context.Context, idOrName string) (c host.Container, err error) {
	err = e.act(ctx, "Inspect", func() error {
		b := e.find(idOrName)
		if b == nil {
			return notFound("container " + idOrName)
		}
		c = b.Container
		return nil
	})
	return c, err
}

// List implements [host.Containers].
func (e *Engine) List(ctx context.Context) (out []host.Container, err error) {
	err = e.act(ctx, "List", func() error {
		for _, b := range e.containers {
			out = append(out, host.Container{ID: b.ID, Name: b.Name, State: b.State, Labels: b.Labels})
		}
		return nil
	})
	return out, err
}

// Events implements [host.Containers].
func (e *Engine) Events(ctx context.Context, since time.Time, live func(), each func(host.Event)) error {
	const buffer = 256
	c := make(chan host.Event, buffer)
	err := e.act(ctx, "Events", func() error {
		for _, ev := range e.past {
			if ev.At.After(since) && len(c) < buffer {
				c <- ev
			}
		}
		e.listeners[c] = true
		return nil
	})
	if err != nil {
		return err
	}
	defer e.locked(func() { delete(e.listeners, c) })
	live()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case ev, open := <-c:
			if !open {
				return host.Errorf(host.KindUnavailable, "the stream ended")
			}
			each(ev)
		}
	}
}

// Logs implements [host.Containers]. It does not follow.
func (e *Engine) Logs(ctx context.Context, id string, q host.LogQuery, each func(time.Time, string) error) error {
	var lines []string
	err := e.act(ctx, "Logs", func() error {
		b := e.find(id)
		if b == nil {
			return notFound("container " + id)
		}
		lines = b.logs
		return nil
	})
	if q.Tail > 0 && len(lines) > q.Tail {
		lines = lines[len(lines)-q.Tail:]
	}
	for _, l := range lines {
		if err == nil {
			err = each(e.now(), l)
		}
	}
	return err
}

// Usage implements [host.Containers].
func (e *Engine) Usage(ctx context.Context, id string) (u host.Usage, err error) {
	err = e.act(ctx, "Usage", func() error {
		b := e.find(id)
		if b == nil {
			return notFound("container " + id)
		}
		u = host.Usage{CPU: e.now().Sub(b.StartedAt), MemoryBytes: 64 << 20}
		return nil
	})
	return u, err
}

// Image implements [host.Images].
func (e *Engine) Image(ctx context.Context, ref string) (image host.Image, err error) {
	err = e.act(ctx, "Image", func() error {
		var ok bool
		if image, ok = e.images[ref]; !ok {
			return notFound("image " + ref)
		}
		return nil
	})
	return image, err
}

// Pull implements [host.Images].
func (e *Engine) Pull(ctx context.Context, ref string, each func(host.PullProgress)) error {
	var r *Remote
	err := e.act(ctx, "Pull", func() error {
		if r = e.registry[ref]; r == nil {
			return host.Errorf(host.KindNotFound, "manifest unknown")
		}
		return nil
	})
	if err != nil {
		return err
	}
	if r.Feed != nil {
		if err := r.Feed(ctx, each); err != nil {
			return err
		}
	}
	each(host.PullProgress{Done: r.Image.Bytes, Total: r.Image.Bytes, Moment: "done"})
	name, _, _ := strings.Cut(ref, "@")
	e.AddImage(r.Image, ref, name+"@"+r.Digest)
	return nil
}

// Resolve implements [host.Images].
func (e *Engine) Resolve(ctx context.Context, ref string) (digest string, err error) {
	err = e.act(ctx, "Resolve", func() error {
		r := e.registry[ref]
		if r == nil {
			return notFound("manifest " + ref)
		}
		digest = r.Digest
		return nil
	})
	return digest, err
}

// EnsureVolume implements [host.Volumes].
func (e *Engine) EnsureVolume(ctx context.Context, name, dir string) error {
	return e.act(ctx, "EnsureVolume", func() error {
		if old, ok := e.volumes[name]; ok && old != dir {
			return host.Errorf(host.KindConflict, "volume %s stands for %s", name, old)
		}
		e.volumes[name] = dir
		return nil
	})
}

// RemoveVolume implements [host.Volumes].
func (e *Engine) RemoveVolume(ctx context.Context, name string) error {
	return e.act(ctx, "RemoveVolume", func() error { delete(e.volumes, name); return nil })
}

func newID() string {
	var b [32]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// ID is a digest or image id made of a word.
func ID(word string) string {
	sum := fmt.Sprintf("%x", word)
	return "sha256:" + (strings.Repeat("0", 64) + sum)[len(sum):]
}
