// Package lifecycle is the only writer of workspace state: it decides, commits, tells hosts and then those who watch.
package lifecycle

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base32"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/scheduler"
)

// Hosts is how lifecycle talks to agents. Calls to a host that has no link fail with KindUnavailable.
type Hosts interface {
	// Apply sends the full desired state of a host. KindConflict: the host has seen a newer stamp.
	Apply(ctx context.Context, desired fleet.DesiredHost) error
	// Observe calls each for every batch after a sequence number, in order, until the host ends the stream (nil) or each fails.
	// Calling it again with a later number tells the host to forget what lies before that.
	Observe(ctx context.Context, host fleet.HostID, after int64, each func(fleet.Observation) error) error
	// Sample returns the latest measurements, times on the gateway's time line.
	Sample(ctx context.Context, host fleet.HostID) ([]fleet.Sample, error)
	// ResolveImage asks what a reference stands for. KindNotFound when the host and the registry have no such image.
	ResolveImage(ctx context.Context, host fleet.HostID, reference string) (fleet.ResolvedImage, error)
}

// Events is told what changed, after the commit. It never blocks.
type Events interface {
	WorkspaceChanged(id fleet.WorkspaceID, owner fleet.UserID)
	HostChanged(id fleet.HostID)
	DevicesChanged()
}

// ImagePolicy says which references may be used besides the catalogue's names.
type ImagePolicy string

// The image policies.
const (
	ImagesAny        ImagePolicy = "any"
	ImagesRegistries ImagePolicy = "registries" // those of Settings.Registries
	ImagesCatalogue  ImagePolicy = "catalogue"  // none
)

// Settings are lifecycle's times and rules. The zero value of a field means its default.
type Settings struct {
	Scheduler        scheduler.Settings
	Images           ImagePolicy   // default ImagesCatalogue
	Registries       []string      // registry host names, or prefixes such as `ghcr.io/lab`
	DefaultImage     string        // when neither user, pool nor catalogue names one; empty: one must be named
	GPULimit         *int          // most devices of a user at once who has no limit of their own; nil: no limit
	WorkspaceLimit   int           // most workspaces of a user that are not deleted; 0: no limit
	StopGrace        time.Duration // between the polite and the hard signal; default 10 s
	Tick             time.Duration // slow tick of the loop, for what no event announced; default 5 s
	Reapply          time.Duration // full desired state to each host although nothing changed; default 1 h
	SampleInterval   time.Duration // default 10 s
	SilentAfter      time.Duration // a linked host that has said nothing for so long counts as unreachable; default 40 s
	SeenInterval     time.Duration // how often "last seen" is recorded; default 30 s
	ApplyTimeout     time.Duration // default 10 s
	SampleTimeout    time.Duration // default 5 s
	ResolveTimeout   time.Duration // of all of an image's look-up; default 30 s
	RetryMin         time.Duration // first pause after a failed call to a host; default 200 ms
	RetryMax         time.Duration // longest pause; default 10 s
	MaxBatchesAtOnce int           // observations of hosts committed at a time; default 8
}

// shortestSilence is the least that SilentAfter may be: a host whose Observe stream has just begun may say nothing for all of its 10 s.
const shortestSilence = 15 * time.Second

func (s Settings) withDefaults() Settings {
	s.Images = cmp.Or(s.Images, ImagesCatalogue)
	s.StopGrace = cmp.Or(s.StopGrace, 10*time.Second)
	s.Tick = cmp.Or(s.Tick, 5*time.Second)
	s.Reapply = cmp.Or(s.Reapply, time.Hour)
	s.SampleInterval = cmp.Or(s.SampleInterval, 10*time.Second)
	s.SilentAfter = max(cmp.Or(s.SilentAfter, 40*time.Second), shortestSilence)
	s.SeenInterval = cmp.Or(s.SeenInterval, 30*time.Second)
	s.ApplyTimeout = cmp.Or(s.ApplyTimeout, 10*time.Second)
	s.SampleTimeout = cmp.Or(s.SampleTimeout, 5*time.Second)
	s.ResolveTimeout = cmp.Or(s.ResolveTimeout, 30*time.Second)
	s.RetryMin = cmp.Or(s.RetryMin, 200*time.Millisecond)
	s.RetryMax = cmp.Or(s.RetryMax, 10*time.Second)
	s.MaxBatchesAtOnce = cmp.Or(s.MaxBatchesAtOnce, 8)
	return s
}

// Deps is what a Lifecycle works with. All fields but Settings are needed.
type Deps struct {
	Store    Store
	Reader   Reader
	Hosts    Hosts
	Events   Events
	Keys     Keys
	Now      func() time.Time // gateway time: a Clock's Now
	Log      *slog.Logger
	Settings Settings
}

// Lifecycle leads workspaces through their lives. Its methods may be called at any time, also before Run and after it; orders are then
// recorded, and carried out by the next Run.
type Lifecycle struct {
	store  Store
	reader Reader
	hosts  Hosts
	events Events
	keys   Keys
	now    func() time.Time
	log    *slog.Logger
	set    Settings
	begun  time.Time

	wake   chan struct{} // one place: a plan is wanted
	relink chan struct{} // one place: links changed
	turns  chan struct{} // as many places as batches may be committed at once

	mu           sync.Mutex
	links        map[fleet.HostID]*link
	sessions     map[fleet.HostID]begin
	heard        map[fleet.HostID]time.Time // last word of a host, gateway time
	linked       chan struct{}              // closed and renewed when a host gets linked
	waits        map[fleet.WorkspaceID]fleet.Wait
	reservations []fleet.Reservation
	seen         fleet.Snapshot // of the last plan
	seenAt       time.Time
	pulls        map[fleet.WorkspaceID]pull
	samples      map[fleet.DeviceID]fleet.Sample
	owners       map[fleet.WorkspaceID]fleet.UserID
	users        map[fleet.HostID]map[fleet.UserID]bool // whose runs a host was last told of
}

// pull is the progress of one run's image.
type pull struct {
	run  fleet.RunKey
	host fleet.HostID
	at   fleet.Pull
}

// New returns a Lifecycle; Run makes it act.
func New(d Deps) *Lifecycle {
	set := d.Settings.withDefaults()
	return &Lifecycle{
		store: d.Store, reader: d.Reader, hosts: d.Hosts, events: d.Events, keys: d.Keys, now: d.Now, log: d.Log, set: set, begun: d.Now(),
		wake: make(chan struct{}, 1), relink: make(chan struct{}, 1), turns: make(chan struct{}, set.MaxBatchesAtOnce),
		links: map[fleet.HostID]*link{}, sessions: map[fleet.HostID]begin{}, heard: map[fleet.HostID]time.Time{}, linked: make(chan struct{}),
		waits: map[fleet.WorkspaceID]fleet.Wait{}, pulls: map[fleet.WorkspaceID]pull{}, samples: map[fleet.DeviceID]fleet.Sample{},
		owners: map[fleet.WorkspaceID]fleet.UserID{}, users: map[fleet.HostID]map[fleet.UserID]bool{},
	}
}

// Replan asks for a new plan: a host was drained, a limit changed, a device was excluded.
func (l *Lifecycle) Replan() { poke(l.wake) }

// poke leaves a note in a channel of one place.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // a note is there already
	}
}

// newWorkspaceID returns 16 characters of `[a-z2-7]`: 80 random bits.
func newWorkspaceID() fleet.WorkspaceID {
	var b [10]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand ends the process instead
	return fleet.WorkspaceID(strings.ToLower(base32.StdEncoding.EncodeToString(b[:])))
}

// changed tells the watchers of workspaces.
func (l *Lifecycle) changed(ctx context.Context, ids ...fleet.WorkspaceID) {
	for _, id := range ids {
		if owner, ok := l.owner(ctx, id); ok {
			l.events.WorkspaceChanged(id, owner)
		}
	}
}

// owner looks a workspace's owner up, once.
func (l *Lifecycle) owner(ctx context.Context, id fleet.WorkspaceID) (fleet.UserID, bool) {
	l.mu.Lock()
	owner, ok := l.owners[id]
	l.mu.Unlock()
	if ok {
		return owner, true
	}
	w, err := l.store.Workspace(ctx, id)
	if err != nil {
		l.log.Warn("owner of a changed workspace not found", "workspace", id, "error", err)
		return "", false
	}
	l.remember(w)
	return w.Owner, true
}

func (l *Lifecycle) remember(w fleet.Workspace) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.owners[w.ID] = w.Owner
	if w.State == fleet.StateDeleted {
		delete(l.owners, w.ID)
	}
}
