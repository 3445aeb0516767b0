package lifecycle_test

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/carrel-dev/carrel/services/event"
	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/lifecycle"
	"github.com/carrel-dev/carrel/services/sqlite"
)

var (
	_ lifecycle.Store  = (*sqlite.DB)(nil)
	_ lifecycle.Reader = (*sqlite.DB)(nil)
	_ lifecycle.Events = (*event.Broker)(nil)
)

var quiet = slog.New(slog.DiscardHandler)

// world is a gateway's core on a real store, with agents in memory, on the time of a synctest bubble.
type world struct {
	t      *testing.T
	db     *sqlite.DB
	clock  *lifecycle.Clock
	hosts  *agents
	events *event.Broker
	lc     *lifecycle.Lifecycle
	set    lifecycle.Settings
	ana    fleet.User
	bo     fleet.User
	failAt *failPoint

	stop  context.CancelFunc
	ended chan error
}

// keys is lifecycle.Keys without the cost of real ones.
type keys struct{}

func (keys) NewHostKey(purpose string) ([]byte, error) { return []byte("sealed " + purpose), nil }

func (keys) HostIdentity(sealed []byte, purpose, principal string, _ time.Time) ([]byte, string, error) {
	if string(sealed) != "sealed "+purpose {
		return nil, "", errors.New("sealed for something else")
	}
	return []byte("key"), "certificate of " + principal, nil
}

// inWorld runs a test in a bubble, with one host of devices for each number.
func inWorld(t *testing.T, devices []int, test func(w *world)) {
	synctest.Test(t, func(t *testing.T) {
		db, err := sqlite.Open(t.Context(), sqlite.Options{Path: filepath.Join(t.TempDir(), "state", "carrel.db"), BallastMiB: -1})
		if err != nil {
			t.Fatal(err)
		}
		w := &world{t: t, db: db, events: event.New(), set: lifecycle.Settings{Images: lifecycle.ImagesAny, ResolveTimeout: 2 * time.Second}}
		w.newClock(time.Now())
		w.hosts = &agents{now: func() time.Time { return w.clock.Now() }, byID: map[fleet.HostID]*agent{}}
		outcomes, err := db.AddUsers(t.Context(), []fleet.User{{Name: "ana", Role: fleet.RoleMember}, {Name: "bo", Role: fleet.RoleMember}}, false, w.clock.Now())
		if err != nil || outcomes[0].Err != nil || outcomes[1].Err != nil {
			t.Fatal(err, outcomes)
		}
		w.ana, w.bo = outcomes[0].User, outcomes[1].User
		for i, n := range devices {
			name := []string{"h1", "h2", "h3"}[i]
			h, err := db.EnsureLocalHost(t.Context(), name, "default", make([]byte, 32), w.clock.Now())
			if err != nil {
				t.Fatal(err)
			}
			w.hosts.byID[h.ID] = newAgent(h.ID, name, n, w.hosts.now)
		}
		w.start()
		for i := range devices {
			w.up(w.host(i))
		}
		w.settle()
		defer func() {
			w.crash()
			if err := db.Close(); err != nil {
				t.Error(err)
			}
			for _, a := range w.hosts.byID {
				for _, o := range a.overlap {
					t.Errorf("I2: two live containers hold one device: %s", o)
				}
				a.set(func(a *agent) {
					for _, c := range a.containers {
						for _, timer := range c.timers {
							timer.Stop()
						}
					}
				})
			}
		}()
		test(w)
	})
}

func (w *world) newClock(wall time.Time) {
	last, err := w.db.LastCommit(context.Background())
	if err != nil {
		w.t.Fatal(err)
	}
	begun := time.Now()
	w.clock = lifecycle.NewClock(wall, func() time.Duration { return time.Since(begun) }, last)
}

// start makes a Lifecycle on the store, as a gateway does that starts.
func (w *world) start() {
	w.t.Helper()
	var store lifecycle.Store = w.db
	if w.failAt != nil {
		store = &failing{Store: w.db, point: w.failAt, crash: func() { w.stop() }}
	}
	clock := w.clock
	w.lc = lifecycle.New(lifecycle.Deps{
		Store: store, Reader: w.db, Hosts: w.hosts, Events: w.events, Keys: keys{}, Now: clock.Now, Log: quiet, Settings: w.set,
	})
	w.run()
}

// run runs the Lifecycle until crash.
func (w *world) run() {
	ctx, cancel := context.WithCancel(context.Background())
	w.stop, w.ended = cancel, make(chan error, 1)
	lc, ended := w.lc, w.ended
	go func() { ended <- lc.Run(ctx) }()
}

// crash ends the Lifecycle; links are lost with it.
func (w *world) crash() {
	w.t.Helper()
	w.stop()
	if err := <-w.ended; err != nil {
		w.t.Errorf("run ended with %v", err)
	}
	for _, a := range w.hosts.byID {
		w.cut(a)
	}
}

// restart is crash and start, with all links back after a moment.
func (w *world) restart() {
	w.t.Helper()
	w.crash()
	w.newClock(time.Now())
	w.start()
	for _, a := range w.hosts.byID {
		w.up(a)
	}
	w.settle()
}

func (w *world) host(i int) *agent {
	name := []string{"h1", "h2", "h3"}[i]
	for _, a := range w.hosts.byID {
		if a.name == name {
			return a
		}
	}
	w.t.Fatalf("no host %d", i)
	return nil
}

// up brings a link up, as the tunnel does.
func (w *world) up(a *agent) {
	w.t.Helper()
	session, err := w.lc.BeginSession(context.Background(), a.id)
	if err != nil {
		w.t.Fatal(err)
	}
	a.set(func(a *agent) { a.up, a.link = true, make(chan struct{}) })
	w.lc.HostUp(a.id, session)
}

// cut loses a link without telling the gateway's core.
func (w *world) cut(a *agent) {
	a.set(func(a *agent) {
		if a.up {
			a.up = false
			close(a.link)
		}
	})
}

// down loses a link, and the tunnel notices.
func (w *world) down(a *agent) {
	w.t.Helper()
	h, err := w.db.Host(context.Background(), string(a.id))
	if err != nil {
		w.t.Fatal(err)
	}
	w.cut(a)
	w.lc.HostDown(a.id, h.Session)
	w.settle()
}

// pass lets the bubble's clock go on; nobody waits.
func pass(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // the clock of a synctest bubble
}

// settle lets two seconds pass, in which all that can happen happens.
func (w *world) settle() {
	pass(2 * time.Second)
	synctest.Wait()
}

func (w *world) order(user fleet.User, name string, gpus int, change ...func(*lifecycle.CreateOrder)) lifecycle.CreateOrder {
	o := lifecycle.CreateOrder{Owner: user, Name: name, Spec: fleet.Spec{Image: "debian", GPU: fleet.GPURequest{Count: gpus}}}
	for _, c := range change {
		c(&o)
	}
	return o
}

func (w *world) create(user fleet.User, name string, gpus int, change ...func(*lifecycle.CreateOrder)) fleet.WorkspaceID {
	w.t.Helper()
	ws, _, err := w.lc.Create(context.Background(), w.order(user, name, gpus, change...))
	if err != nil {
		w.t.Fatalf("create %s: %v", name, err)
	}
	return ws.ID
}

func (w *world) get(id fleet.WorkspaceID) fleet.Workspace {
	w.t.Helper()
	ws, err := w.db.Workspace(context.Background(), id)
	if err != nil {
		w.t.Fatal(err)
	}
	return ws
}

func (w *world) is(id fleet.WorkspaceID, want fleet.State) fleet.Workspace {
	w.t.Helper()
	ws := w.get(id)
	if ws.State != want {
		wait, _ := w.lc.QueuePlace(id)
		w.t.Fatalf("%s is %s (%+v; %s), want %s", ws.Name, ws.State, ws.Reason, wait.Why, want)
	}
	return ws
}

func (w *world) leases(id fleet.WorkspaceID) []fleet.Lease {
	w.t.Helper()
	v, err := w.db.View(context.Background(), id)
	if err != nil {
		w.t.Fatal(err)
	}
	return v.Leases
}

// failPoint says at which call to the store the gateway dies, and on which side of the commit.
type failPoint struct {
	mu     sync.Mutex
	at     int // counts down
	before bool
	hit    string
}

// failing is a store whose gateway dies at a point.
type failing struct {
	lifecycle.Store
	point *failPoint
	crash func()
}

var errCrashed = errors.New("the gateway died here")

// reach counts a call; act is the call itself.
func (f *failing) reach(name string, act func() error) error {
	f.point.mu.Lock()
	f.point.at--
	here := f.point.at == 0
	if here {
		f.point.hit = name
	}
	dead := f.point.at < 0
	f.point.mu.Unlock()
	if dead {
		return errCrashed
	}
	if !here {
		return act()
	}
	if !f.point.before {
		if err := act(); err != nil {
			return err
		}
	}
	f.crash()
	return errCrashed
}

func (f *failing) CreateWorkspace(ctx context.Context, o fleet.NewWorkspace, now time.Time) (w fleet.Workspace, replay bool, err error) {
	err = f.reach("create", func() (err error) { w, replay, err = f.Store.CreateWorkspace(ctx, o, now); return err })
	return w, replay, err
}

func (f *failing) QueueRun(ctx context.Context, o fleet.StartOrder, now time.Time) (w fleet.Workspace, err error) {
	err = f.reach("queue", func() (err error) { w, err = f.Store.QueueRun(ctx, o, now); return err })
	return w, err
}

func (f *failing) Stop(ctx context.Context, o fleet.StopOrder, now time.Time) (w fleet.Workspace, c fleet.Changes, err error) {
	err = f.reach("stop", func() (err error) { w, c, err = f.Store.Stop(ctx, o, now); return err })
	return w, c, err
}

func (f *failing) Commit(ctx context.Context, p fleet.Plan, now time.Time) (c fleet.Committed, err error) {
	err = f.reach("commit", func() (err error) { c, err = f.Store.Commit(ctx, p, now); return err })
	return c, err
}

func (f *failing) Observe(ctx context.Context, o fleet.Observation, now time.Time, d lifecycle.Decide) (c fleet.Changes, err error) {
	if len(o.Runs) == 0 {
		return f.Store.Observe(ctx, o, now, d)
	}
	err = f.reach("observe", func() (err error) { c, err = f.Store.Observe(ctx, o, now, d); return err })
	return c, err
}

func (f *failing) Desired(ctx context.Context, h fleet.HostID) (d fleet.DesiredHost, err error) {
	err = f.reach("dispatch", func() (err error) { d, err = f.Store.Desired(ctx, h); return err })
	return d, err
}

// fullDisk is a store that cannot be written for a while.
type fullDisk struct {
	lifecycle.Store
	mu   sync.Mutex
	full bool
}

func (f *fullDisk) set(full bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.full = full
}

func (f *fullDisk) Observe(ctx context.Context, o fleet.Observation, now time.Time, d lifecycle.Decide) (fleet.Changes, error) {
	f.mu.Lock()
	full := f.full
	f.mu.Unlock()
	if full {
		return fleet.Changes{}, fleet.Errorf(fleet.KindUnavailable, "the database's disk is full")
	}
	return f.Store.Observe(ctx, o, now, d)
}
