package sqlite_test

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/sqlite"
)

// childPath is set in a process that is a gateway to be killed.
const childPath = "CARREL_TEST_CHILD_DB"

func TestMain(m *testing.M) {
	if path := os.Getenv(childPath); path != "" {
		if err := child(path, os.Stdout); err != nil {
			fmt.Println("ERROR", err)
			os.Exit(1)
		}
		return
	}
	if err := flag.Set("rapid.checks", "20"); err != nil { // the command line may say more
		panic(err)
	}
	os.Exit(m.Run())
}

// child works until it is killed: it places, ends and deletes workspaces from eight goroutines, and says each name once the store
// said that it is on disk; beside them it reports and copies.
func child(path string, out io.Writer) error {
	ctx := context.Background()
	db, err := sqlite.Open(ctx, sqlite.Options{Path: path, BallastMiB: -1})
	if err != nil {
		return err
	}
	user, err := db.UserByName(ctx, "ana")
	if err != nil {
		return err
	}
	host, err := db.Host(ctx, "h1")
	if err != nil {
		return err
	}
	var mu sync.Mutex
	say := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		_, _ = fmt.Fprintf(out, format+"\n", args...)
	}
	say("OPEN")
	session, _, _, err := db.BeginSession(ctx, host.ID, time.Now())
	if err != nil {
		return err
	}
	b := &busy{db: db, user: user, host: host, session: session, run: time.Now().UnixNano(), say: say}
	faults := make(chan error, 16)
	for worker := range 8 {
		go func() { faults <- b.work(ctx, worker) }()
	}
	go func() { faults <- b.look(ctx) }()
	return <-faults
}

type busy struct {
	db      *sqlite.DB
	user    fleet.User
	host    fleet.Host
	session int64
	run     int64
	say     func(string, ...any)
	mu      sync.Mutex
	seq     int64
}

// observe keeps the batches of the host in order, as its one stream does.
func (b *busy) observe(ctx context.Context, r fleet.ObservedRun) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.seq++
	_, err := b.db.Observe(ctx, fleet.Observation{Host: b.host.ID, Session: b.session, JournalID: fmt.Sprint(b.run), Seq: b.seq, Runs: []fleet.ObservedRun{r}}, time.Now(), decide)
	return err
}

func (b *busy) work(ctx context.Context, worker int) error {
	device := fleet.DeviceID(fmt.Sprintf("G%d", worker))
	for n := 0; ; n++ {
		name := fmt.Sprintf("w%d-%d-%d", worker, b.run%1_000_000_000, n)
		order := fleet.NewWorkspace{Workspace: fleet.Workspace{Name: name, Owner: b.user.ID, Spec: fleet.Spec{GPU: fleet.GPURequest{Count: 1}}}, Queue: true, RequestID: name}
		w, _, err := b.db.CreateWorkspace(ctx, order, time.Now())
		if err != nil {
			return fmt.Errorf("create: %w", err)
		}
		b.say("CREATED %s", w.ID)
		key := fleet.RunKey{Workspace: w.ID, Epoch: 1}
		done, err := b.db.Commit(ctx, fleet.Plan{Placements: []fleet.Placement{{Run: key, Host: b.host.ID, Devices: []fleet.DeviceID{device}}}}, time.Now())
		if err != nil {
			return fmt.Errorf("commit: %w", err)
		}
		if len(done.Placed) == 0 { // a run of the process before holds it: end that one
			if err := b.freeDevice(ctx, device); err != nil {
				return err
			}
			continue
		}
		b.say("PLACED %s", w.ID)
		if err := b.observe(ctx, fleet.ObservedRun{Key: key, Phase: fleet.PhaseReady, StartedAt: time.Now()}); err != nil {
			return fmt.Errorf("observe: %w", err)
		}
		if _, _, err := b.db.Stop(ctx, fleet.StopOrder{Workspace: w.ID, Goal: fleet.GoalDeleted}, time.Now()); err != nil {
			return fmt.Errorf("stop: %w", err)
		}
		if err := b.observe(ctx, fleet.ObservedRun{Key: key, Phase: fleet.PhaseGone, EndedAt: time.Now()}); err != nil {
			return fmt.Errorf("observe end: %w", err)
		}
		b.say("ENDED %s", w.ID)
	}
}

func (b *busy) freeDevice(ctx context.Context, device fleet.DeviceID) error {
	rows, err := b.db.Devices(ctx, sqlite.DeviceFilter{})
	if err != nil {
		return err
	}
	for _, r := range rows {
		if r.ID == device && r.Lease != nil {
			return b.observe(ctx, fleet.ObservedRun{Key: r.Lease.Run, Phase: fleet.PhaseGone, EndedAt: time.Now()})
		}
	}
	return nil
}

// look reports, makes snapshots and copies while others write.
func (b *busy) look(ctx context.Context) error {
	for n := 0; ; n++ {
		if _, err := b.db.Report(ctx, fleet.UsageQuery{By: "workspace", Now: time.Now()}); err != nil {
			return fmt.Errorf("report: %w", err)
		}
		if _, err := b.db.Snapshot(ctx, func(fleet.HostID) bool { return true }); err != nil {
			return fmt.Errorf("snapshot: %w", err)
		}
		if n%20 == 19 {
			path := fmt.Sprintf("%s.copy-%d-%d", b.db.Path(), b.run, n)
			if err := b.db.Backup(ctx, path); err != nil {
				return fmt.Errorf("copy: %w", err)
			}
			if err := os.Remove(path); err != nil {
				return err
			}
		}
	}
}

// spawn runs a child until it has acknowledged some rows, kills it, and returns what it said.
func spawn(t *testing.T, path string, lines int) []string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), childPath+"="+path)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill := time.AfterFunc(60*time.Second, func() { _ = cmd.Process.Kill() })
	defer kill.Stop()
	var said []string
	scan := bufio.NewScanner(out)
	for scan.Scan() {
		said = append(said, scan.Text())
		if len(said) == lines {
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
	}
	_ = cmd.Wait() // killed
	if len(said) < lines {
		t.Fatalf("the child said %d of %d lines; last %q", len(said), lines, said[max(0, len(said)-1):])
	}
	return said
}

func TestKilledGatewayLosesNothingAcknowledged_R1(t *testing.T) {
	r := newRoom(t)
	r.facts(r.h1.ID, devices("G0", "G1", "G2", "G3", "G4", "G5", "G6", "G7"))
	path := r.Path()
	r.ok(r.Close())
	created, placed, ended := map[string]bool{}, map[string]bool{}, map[string]bool{}
	sets := map[string]map[string]bool{"CREATED": created, "PLACED": placed, "ENDED": ended}
	for range kills {
		for _, line := range spawn(t, path, 1+rand.IntN(40)) {
			verb, id, _ := strings.Cut(line, " ")
			if verb == "ERROR" {
				t.Fatalf("the child failed: %s", line)
			}
			if set := sets[verb]; set != nil {
				set[id] = true
			}
		}
	}
	db := open(t, sqlite.Options{Path: path, Integrity: sqlite.IntegrityFull, BallastMiB: -1})
	ctx := context.Background()
	for id := range created {
		w, err := db.Workspace(ctx, fleet.WorkspaceID(id))
		if err != nil {
			t.Errorf("created %s is lost: %v", id, err)
			continue
		}
		v, err := db.View(ctx, w.ID)
		if err != nil || (placed[id] && len(v.Leases) != 1) || (ended[id] && (w.State != fleet.StateDeleted || v.Leases[0].ReleasedAt.IsZero())) {
			t.Errorf("%s: placed %v, ended %v, is %s with %+v, %v", id, placed[id], ended[id], w.State, v.Leases, err)
		}
	}
	n, differences, err := db.CheckLedger(ctx, time.Now())
	if err != nil || len(differences) > 0 || n < int64(len(placed)) {
		t.Errorf("%d leases, %v, %v", n, differences, err)
	}
	t.Logf("%d kills: %d created, %d placed, %d ended, all there", kills, len(created), len(placed), len(ended))
}

func TestWritersReportsAndCopiesDoNotLockEachOther_ACCT17(t *testing.T) {
	r := newRoom(t)
	r.facts(r.h1.ID, devices("G0", "G1", "G2", "G3", "G4", "G5", "G6", "G7"))
	path := r.Path()
	r.ok(r.Close())
	acknowledged := 0
	for range 2 {
		for _, line := range spawn(t, path, busyLines) {
			if strings.HasPrefix(line, "ERROR") {
				t.Fatal(line)
			}
			acknowledged++
		}
	}
	db := open(t, sqlite.Options{Path: path, Integrity: sqlite.IntegrityFull, BallastMiB: -1})
	if _, differences, err := db.CheckLedger(context.Background(), time.Now()); err != nil || len(differences) > 0 {
		t.Errorf("%v %v", differences, err)
	}
}

// smallDisk mounts a file system of a few MiB.
func smallDisk(t *testing.T, size string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting a file system needs root")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size+",mode=0700"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// fillDisk takes all that is left.
func fillDisk(t *testing.T, dir string) string {
	t.Helper()
	path := filepath.Join(dir, "filler")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	block := make([]byte, 4096)
	for {
		if _, err := f.Write(block); errors.Is(err, syscall.ENOSPC) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestFullDiskStillRecordsEndsAndRecovers_REL17_R8(t *testing.T) {
	dir := smallDisk(t, "20m")
	path := filepath.Join(dir, "carrel.db")
	r := newRoom(t, func(o *sqlite.Options) { o.Path = path; o.BallastMiB = 4 })
	ctx := context.Background()
	w1, w2 := r.create(r.ana, "w1", 1), r.create(r.ana, "w2", 1)
	k1, k2 := r.ready(w1, r.h1.ID, "G0"), r.ready(w2, r.h1.ID, "G1")
	filler := fillDisk(t, dir)
	acked := 0
	for n := 0; ; n++ { // the log has room for some
		_, _, err := r.CreateWorkspace(ctx, r.order(r.ana, fmt.Sprintf("n%d", n), 0), r.now)
		if err == nil {
			acked++
			continue
		}
		r.kind(err, fleet.KindExhausted)
		if !strings.Contains(fleet.UserMessage(err), "disk is full") {
			t.Errorf("message %q", fleet.UserMessage(err))
		}
		break
	}
	// Reports, stops and ends go on.
	r.now = r.now.Add(time.Hour)
	r.report(fleet.UsageQuery{})
	r.stop(w1.ID, fleet.GoalStopped)
	r.gone(k1, r.now)
	if l := r.leases(w1.ID)[0]; !l.ReleasedAt.Equal(r.now) {
		t.Errorf("lease %+v was not released", l)
	}
	_, _, err := r.CreateWorkspace(ctx, r.order(r.ana, "refused", 0), r.now)
	r.kind(err, fleet.KindExhausted)
	r.ok(os.Remove(filler))
	r.now = r.now.Add(time.Minute)
	r.create(r.ana, "after", 0)
	r.gone(k2, r.now)
	page, _, err := r.Workspaces(ctx, fleet.WorkspaceFilter{Limit: 1000})
	r.ok(err)
	if len(page) != acked+3 {
		t.Errorf("%d workspaces, %d were acknowledged", len(page), acked+3)
	}
	r.checked()
	if info, err := os.Stat(path + ".ballast"); err != nil || info.Size() != 4<<20 {
		t.Errorf("the ballast was not laid again: %v", err)
	}
	r.ok(r.Close())
	again := open(t, sqlite.Options{Path: path, Integrity: sqlite.IntegrityFull, BallastMiB: 4})
	if _, err := again.UserByName(ctx, "ana"); err != nil {
		t.Error(err)
	}
}
