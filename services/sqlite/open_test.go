package sqlite_test

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/sqlite"
)

func TestFilesAreNarrowAndHoldNoSecret_T11(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	_, err := r.AddToken(ctx, fleet.Token{User: r.ana.ID, CreatedAt: r.now}, hash("carrel_secret"))
	r.ok(err)
	copied := filepath.Join(t.TempDir(), "copy.db")
	r.ok(r.Backup(ctx, copied))
	r.kind(r.Backup(ctx, copied), fleet.KindExists)
	files, err := filepath.Glob(filepath.Dir(r.Path()) + "/*")
	r.ok(err)
	if len(files) < 4 {
		t.Errorf("files %v", files)
	}
	for _, f := range append(files, copied) {
		info, err := os.Stat(f)
		r.ok(err)
		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %o", f, info.Mode().Perm())
		}
		content, err := os.ReadFile(f)
		r.ok(err)
		if strings.Contains(string(content), "carrel_secret") {
			t.Errorf("%s holds a secret", f)
		}
	}
	// What is stored does not sign anyone in.
	stored := hash("carrel_secret")
	for _, secret := range []string{string(stored), hex.EncodeToString(stored)} {
		_, _, err := r.TokenByHash(ctx, hash(secret), r.now)
		r.kind(err, fleet.KindUnauthenticated)
	}
}

func TestWideModesAreRefused_T11(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	path := filepath.Join(dir, "carrel.db")
	if err := open(t, sqlite.Options{Path: path}).Close(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path string
		mode fs.FileMode
	}{{path, 0o644}, {dir, 0o755}} {
		before, err := os.Stat(c.path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(c.path, c.mode); err != nil {
			t.Fatal(err)
		}
		_, err = sqlite.Open(context.Background(), sqlite.Options{Path: path})
		if !fleet.IsKind(err, fleet.KindInvalid) || !strings.Contains(err.Error(), "chmod") {
			t.Errorf("mode %o of %s: %v", c.mode, c.path, err)
		}
		if err := os.Chmod(c.path, before.Mode().Perm()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSecondGatewayIsRefusedAtOnce_R13(t *testing.T) {
	r := newRoom(t)
	for range 50 {
		begin := time.Now()
		_, err := sqlite.Open(context.Background(), sqlite.Options{Path: r.Path()})
		r.kind(err, fleet.KindConflict)
		if !strings.Contains(err.Error(), fmt.Sprintf("process %d on ", os.Getpid())) {
			t.Fatalf("message %q does not name the holder", err)
		}
		if took := time.Since(begin); took > time.Second {
			t.Fatalf("refused after %s", took)
		}
	}
}

func TestBrokenLockFencesTheFirstGateway_R13(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	r.ok(os.Remove(r.Path() + ".lock")) // as if the lock did not hold: two locks of one name
	second := open(t, sqlite.Options{Path: r.Path(), BallastMiB: -1})
	_, _, err := r.CreateWorkspace(ctx, r.order(r.ana, "lost", 0), r.now)
	r.kind(err, fleet.KindUnavailable)
	if r.Failed() == nil {
		t.Error("the first gateway is not told to end")
	}
	r.kind(r.Seen(ctx, r.h1.ID, r.now), fleet.KindUnavailable)
	if _, _, err := second.CreateWorkspace(ctx, r.order(r.ana, "kept", 0), r.now); err != nil {
		t.Error(err)
	}
	page, _, err := second.Workspaces(ctx, fleet.WorkspaceFilter{})
	r.ok(err)
	if len(page) != 1 || page[0].Name != "kept" {
		t.Errorf("workspaces %+v", page)
	}
}

// with is this program's schema and one more step.
func with(step string) fs.FS {
	files := fstest.MapFS{"0002_test.sql": {Data: []byte(step)}}
	first, err := fs.ReadFile(sqlite.Embedded(), "0001_init.sql")
	if err != nil {
		panic(err)
	}
	files["0001_init.sql"] = &fstest.MapFile{Data: first}
	return files
}

// fixture is a file of schema 1 with data, made from frozen text.
func fixture(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "state", "carrel.db")
	if err := open(t, sqlite.Options{Path: path, BallastMiB: -1}).Close(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("testdata/0001_data.sql")
	if err != nil {
		t.Fatal(err)
	}
	raw, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := raw.Exec(string(text)); err != nil {
		t.Fatal(err)
	}
	if err := raw.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestMigrationKeepsDataAndACopy_R14(t *testing.T) {
	path := fixture(t)
	opts := sqlite.Options{Path: path, BallastMiB: -1}
	sqlite.WithMigrations(&opts, with(`ALTER TABLE host ADD COLUMN note TEXT NOT NULL DEFAULT ''; UPDATE user SET login = login || '2';`))
	db := open(t, opts)
	ctx := context.Background()
	u, err := db.UserByName(ctx, "ana")
	if err != nil || u.Login != "ana2" {
		t.Errorf("migrated user %+v %v", u, err)
	}
	w, err := db.FindWorkspace(ctx, u.ID, "fraud")
	if err != nil || w.State != fleet.StateRunning || w.Spec.GPU.Count != 1 {
		t.Errorf("migrated workspace %+v %v", w, err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	// The older program refuses the newer file, and does not write to it.
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	_, err = sqlite.Open(ctx, sqlite.Options{Path: path, BallastMiB: -1})
	if !fleet.IsKind(err, fleet.KindConflict) || !strings.Contains(err.Error(), "schema 2") {
		t.Errorf("newer schema: %v", err)
	}
	after, err := os.ReadFile(path)
	if err != nil || string(after) != string(before) {
		t.Errorf("the older program wrote to the newer file (%v)", err)
	}
	// The way back is the copy.
	copied := path + ".before-0002"
	if err := os.Rename(copied, path); err != nil {
		t.Fatal(err)
	}
	for _, suffix := range []string{"-wal", "-shm"} {
		if err := os.Remove(path + suffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
	old := open(t, sqlite.Options{Path: path, BallastMiB: -1})
	if u, err := old.UserByName(ctx, "ana"); err != nil || u.Login != "ana" {
		t.Errorf("restored user %+v %v", u, err)
	}
	generation, err := old.Recover(ctx, 7, time.UnixMilli(0))
	if err != nil || generation != 8 || old.Generation() != 8 {
		t.Errorf("generation %d %v", generation, err)
	}
}

func TestFailedMigrationChangesNothing(t *testing.T) {
	path := fixture(t)
	opts := sqlite.Options{Path: path, BallastMiB: -1}
	sqlite.WithMigrations(&opts, with(`UPDATE user SET login = 'x' WHERE name = 'ana'; SELECT no_such_function();`))
	if _, err := sqlite.Open(context.Background(), opts); err == nil {
		t.Fatal("a broken migration passed")
	}
	db := open(t, sqlite.Options{Path: path, BallastMiB: -1})
	if u, err := db.UserByName(context.Background(), "ana"); err != nil || u.Login != "ana" {
		t.Errorf("user %+v %v", u, err)
	}
}

func TestFixtureOpensAsItIs(t *testing.T) {
	db := open(t, sqlite.Options{Path: fixture(t), BallastMiB: -1})
	ctx := context.Background()
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	report, err := db.Report(ctx, fleet.UsageQuery{By: "project", Now: now})
	if err != nil || report.Total.GPUMs == 0 || report.Total.ActiveMs == 0 {
		t.Errorf("report %+v %v", report, err)
	}
	n, differences, err := db.CheckLedger(ctx, now)
	if err != nil || n != 2 || len(differences) != 0 {
		t.Errorf("%d leases, %v, %v", n, differences, err)
	}
	rows, err := db.Damaged(ctx)
	if err != nil || len(rows) != 0 {
		t.Errorf("damaged %v %v", rows, err)
	}
}

func TestOtherFilesAreRefused_R16(t *testing.T) {
	ctx := context.Background()
	path := fixture(t)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path+".before-0001", good, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func([]byte) []byte{
		"not a database": func([]byte) []byte { return []byte(strings.Repeat("not a database ", 1000)) },
		"broken page": func(b []byte) []byte {
			for i := 2 * 4096; i < 2*4096+64; i++ {
				b[i] ^= 0xff
			}
			return b
		},
		"cut short": func(b []byte) []byte { return b[:len(b)/2] },
	} {
		if err := os.WriteFile(path, change(append([]byte(nil), good...)), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := sqlite.Open(ctx, sqlite.Options{Path: path, BallastMiB: -1})
		if err == nil || !strings.Contains(fleet.UserMessage(err), path+".before-0001") {
			t.Errorf("%s: %v; the message must name the copy", name, err)
		}
	}
	foreign := filepath.Join(t.TempDir(), "state", "other.db")
	if err := os.MkdirAll(filepath.Dir(foreign), 0o700); err != nil {
		t.Fatal(err)
	}
	raw, err := sql.Open("sqlite", foreign)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := raw.Exec(`CREATE TABLE songs (name TEXT)`); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(raw.Close(), os.Chmod(foreign, 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := sqlite.Open(ctx, sqlite.Options{Path: foreign}); !fleet.IsKind(err, fleet.KindConflict) {
		t.Errorf("another program's file: %v", err)
	}
}

func TestDamagedRowsAreIsolated_REL18(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	state, spec, good := r.create(r.ana, "w1", 1), r.create(r.ana, "w2", 1), r.create(r.ana, "w3", 1)
	waiting := r.create(r.ana, "w4", 1)
	k1, k2, k3 := r.ready(state, r.h1.ID, "G0"), r.ready(spec, r.h1.ID, "G1"), r.ready(good, r.h1.ID, "G2")
	raw := r.raw()
	for _, s := range []string{
		`UPDATE workspace SET state = 'dreaming' WHERE id = '` + string(state.ID) + `'`,
		`UPDATE workspace SET spec = '{"broken' WHERE id IN ('` + string(spec.ID) + `', '` + string(waiting.ID) + `')`,
	} {
		_, err := raw.Exec(s)
		r.ok(err)
	}
	rows, err := r.Damaged(ctx)
	r.ok(err)
	if len(rows) != 3 || rows[0].Table != "workspace" || rows[0].Err == nil {
		t.Errorf("damaged %+v", rows)
	}
	page, _, err := r.Workspaces(ctx, fleet.WorkspaceFilter{})
	r.ok(err)
	views, err := r.Views(ctx, []fleet.WorkspaceID{state.ID, spec.ID, good.ID})
	r.ok(err)
	if len(page) != 1 || page[0].ID != good.ID || len(views) != 1 {
		t.Errorf("page %+v, views %+v", page, views)
	}
	if s := r.snapshot(); len(s.Waiting) != 0 || s.Held[r.ana.ID] != 3 {
		t.Errorf("snapshot %+v", s)
	}
	d, err := r.Desired(ctx, r.h1.ID)
	r.ok(err)
	if len(d.Runs) != 1 || d.Runs[0].Workspace.ID != good.ID {
		t.Errorf("desired %+v", d.Runs)
	}
	_, _, err = r.Stop(ctx, fleet.StopOrder{Workspace: spec.ID, Goal: fleet.GoalStopped}, r.now)
	r.kind(err, fleet.KindInternal)
	r.now = r.now.Add(time.Hour)
	r.stop(good.ID, fleet.GoalStopped)
	r.gone(k3, r.now)
	r.gone(k1, r.now)
	r.gone(k2, r.now)
	if s := r.snapshot(); s.Held[r.ana.ID] != 0 {
		t.Errorf("devices of damaged rows stay held: %+v", s.Held)
	}
	if got := r.workspace(good.ID); got.State != fleet.StateStopped {
		t.Errorf("the good one is %s", got.State)
	}
	r.checked()
}

func TestErrorUndoesOnlyItsOwnPart(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	const add = `INSERT INTO audit (at, actor, verb, subject) VALUES (1, 'x', 'y', 'z')`
	boom := errors.New("boom")
	var group sync.WaitGroup
	for i := range 200 {
		group.Go(func() {
			var after func() error
			switch i % 4 {
			case 1:
				after = func() error { return boom }
			case 2:
				after = func() error { panic("broken function") }
			}
			err := r.WriteText(ctx, r.now, after, add)
			if (after == nil) != (err == nil) || (i%4 == 1 && !errors.Is(err, boom)) {
				t.Errorf("function %d: %v", i, err)
			}
		})
	}
	group.Wait()
	if rows, err := r.Audits(ctx, 1000); err != nil || len(rows) != 100 {
		t.Errorf("%d rows of 100, %v", len(rows), err)
	}
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if err := r.WriteText(cancelled, r.now, nil, add); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled caller: %v", err)
	}
	r.ok(r.Close())
	r.kind(r.WriteText(ctx, r.now, nil, add), fleet.KindUnavailable)
	_, err := r.Hosts(ctx)
	r.kind(err, fleet.KindUnavailable)
}

// T-16: what is refused costs no commit, so that a caller without a sign-in cannot make the disk flush at each try.
func TestRefusedWritesCommitNothing_T16(t *testing.T) {
	var path string
	r := newRoom(t, func(o *sqlite.Options) { path = o.Path })
	ctx := context.Background()
	stored := func() string {
		var all []byte
		for _, suffix := range []string{"", "-wal"} {
			content, err := os.ReadFile(path + suffix)
			r.ok(err)
			all = append(all, content...)
		}
		return string(hash(string(all)))
	}
	before := stored()
	last, err := r.LastCommit(ctx)
	r.ok(err)
	later := r.now.Add(time.Hour)
	var group sync.WaitGroup
	for i := range 50 {
		group.Go(func() {
			if _, err := r.UseSignIn(ctx, hash(fmt.Sprint("guess ", i)), later); !fleet.IsKind(err, fleet.KindUnauthenticated) {
				t.Errorf("sign-in with a guess: %v", err)
			}
		})
	}
	group.Wait()
	r.kind(r.RevokeToken(ctx, "none", "", later), fleet.KindNotFound)
	if after, err := r.LastCommit(ctx); err != nil || !after.Equal(last) {
		t.Errorf("last commit %s, then %s, %v", last, after, err)
	}
	if stored() != before {
		t.Error("a refused write changed the database")
	}
	r.create(r.ana, "w1", 0) // and the next one is kept
	if stored() == before {
		t.Error("a good write changed nothing")
	}
}

func TestReadersWithoutAPauseDoNotGrowTheLog_REL16(t *testing.T) {
	r := newRoom(t, func(o *sqlite.Options) { o.WALLimitMiB = 1; o.WALPages = 100 })
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	for i := range 3 { // there is always one in the middle of its transaction
		group.Go(func() {
			for ctx.Err() == nil {
				err := r.HoldRead(ctx, func(context.Context) {
					select {
					case <-time.After(time.Duration(10+7*i) * time.Millisecond):
					case <-ctx.Done():
					}
				})
				if err != nil && ctx.Err() == nil {
					t.Error(err)
				}
			}
		})
	}
	largest := int64(0)
	for range 200 {
		r.ok(r.WriteText(context.Background(), r.now, nil, `INSERT INTO audit (at, actor, verb, subject) VALUES (1, 'x', 'y', hex(randomblob(20000)))`))
		info, err := os.Stat(r.Path() + "-wal")
		r.ok(err)
		largest = max(largest, info.Size())
	}
	cancel()
	group.Wait()
	if largest > 4<<20 {
		t.Errorf("the log grew to %d bytes", largest)
	}
}

func TestReaderThatStopsIsCutOff_REL16(t *testing.T) {
	r := newRoom(t, func(o *sqlite.Options) { o.ReadTimeout = 300 * time.Millisecond; o.WALPages = 100 })
	ctx := context.Background()
	held := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- r.HoldRead(ctx, func(ctx context.Context) {
			close(held)
			<-ctx.Done()
		})
	}()
	<-held
	write := func() {
		for range 60 {
			r.ok(r.WriteText(ctx, r.now, nil, `INSERT INTO audit (at, actor, verb, subject) VALUES (1, 'x', 'y', hex(randomblob(20000)))`))
		}
	}
	write()
	if err := <-done; !fleet.IsKind(err, fleet.KindUnavailable) {
		t.Errorf("the reader ended with %v", err)
	}
	write()
	info, err := os.Stat(r.Path() + "-wal")
	r.ok(err)
	if info.Size() > 64<<20 {
		t.Errorf("log of %d bytes", info.Size())
	}
	r.ok(r.WriteText(ctx, r.now, nil, `DELETE FROM audit`))
	for deadline := time.Now().Add(10 * time.Second); ; {
		r.ok(r.Seen(ctx, r.h1.ID, r.now))
		if info, err = os.Stat(r.Path() + "-wal"); err == nil && info.Size() <= 9<<20 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the log does not shrink: %d bytes", info.Size())
		}
	}
}
