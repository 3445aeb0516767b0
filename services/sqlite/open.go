// Package sqlite is the durable store: one SQLite file with one writer, a file per noun.
package sqlite

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	_ "modernc.org/sqlite" // the driver `sqlite`

	"github.com/carrel-dev/carrel/services/fleet"
)

// Integrity says how much of the file is checked when it is opened.
type Integrity string

// The checks. Quick reads every page and finds broken structure; Full also compares indexes with their tables.
const (
	IntegrityNone  Integrity = "none"
	IntegrityQuick Integrity = "quick"
	IntegrityFull  Integrity = "full"
)

// Options are a database's settings. Zero values mean the defaults named beside them.
type Options struct {
	Path             string                // the file; its directory is made with mode 0700
	BusyTimeout      time.Duration         // 5 s; how long a lock of another process, such as a backup, is waited for
	ReadTimeout      time.Duration         // 30 s; longest read transaction, so that no reader keeps the log from being checkpointed
	Readers          int                   // 4; read connections
	MaxBatch         int                   // 512; most write functions in one transaction
	Integrity        Integrity             // quick
	BallastMiB       int                   // 8; space set aside for the day the disk is full; negative: none
	WALPages         int                   // 1000; pages after which the log is checkpointed
	WALLimitMiB      int                   // 32; size from which the writer waits a moment for readers, so that the log can begin anew
	CPUOnlyPercent   int                   // 10; share of a GPU host kept for runs without devices; negative: none
	DefaultGPULimit  int                   // 0: none; most devices of a user without a limit of their own
	UnreachableAfter time.Duration         // 60 s; an open lease counts as provisional when its host was not seen for so long
	RequestTTL       time.Duration         // 24 h; how long a request id is remembered
	EventsKept       int                   // 200; events per workspace
	Declared         []fleet.DeclaredMount // host paths that an admin offers by name
	Random           io.Reader             // crypto/rand; for ids
	Log              *slog.Logger          // discard

	migrations fs.FS // the embedded ones; tests give others
}

func (o Options) withDefaults() Options {
	setDefault(&o.BusyTimeout, 5*time.Second)
	setDefault(&o.ReadTimeout, 30*time.Second)
	setDefault(&o.Readers, 4)
	setDefault(&o.MaxBatch, 512)
	setDefault(&o.Integrity, IntegrityQuick)
	setDefault(&o.BallastMiB, 8)
	setDefault(&o.WALPages, 1000)
	setDefault(&o.WALLimitMiB, 32)
	setDefault(&o.CPUOnlyPercent, 10)
	setDefault(&o.UnreachableAfter, time.Minute)
	setDefault(&o.RequestTTL, 24*time.Hour)
	setDefault(&o.EventsKept, 200)
	o.CPUOnlyPercent = max(o.CPUOnlyPercent, 0)
	if o.Random == nil {
		o.Random = rand.Reader
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.migrations == nil {
		o.migrations = embedded()
	}
	return o
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// DB is the store. All methods may be called at once; each is one transaction.
type DB struct {
	opts     Options
	log      *slog.Logger
	lock     *lock
	pool     *sql.DB
	declared map[string]fleet.DeclaredMount
	readers  chan *session
	queue    chan *job
	stop     chan struct{}
	done     chan struct{}
	closing  sync.Once

	writer     *session // used by the writer goroutine only
	lastCommit atomic.Int64
	generation atomic.Int64
	nonce      int64
	failed     atomic.Pointer[error] // set once when the file cannot be trusted any more
	ballast    ballast
	batches    int // since the log's size was looked at
}

// Open takes the process lock, checks modes and integrity, and migrates, with a copy of the file before. KindConflict names the
// process that holds the file; a file of a newer Carrel, a wider mode or a broken page is refused.
func Open(ctx context.Context, opts Options) (*DB, error) {
	opts = opts.withDefaults()
	if opts.Path == "" {
		return nil, fleet.Errorf(fleet.KindInvalid, "the database needs a path")
	}
	if err := prepareFiles(opts.Path); err != nil {
		return nil, err
	}
	l, err := takeLock(opts.Path + ".lock")
	if err != nil {
		return nil, err
	}
	db := &DB{
		opts: opts, log: opts.Log, lock: l, declared: map[string]fleet.DeclaredMount{},
		queue: make(chan *job, 4*opts.MaxBatch), stop: make(chan struct{}), done: make(chan struct{}),
		readers: make(chan *session, opts.Readers),
		ballast: ballast{path: opts.Path + ".ballast", size: int64(opts.BallastMiB) << 20},
	}
	for _, d := range opts.Declared {
		db.declared[d.Name] = d
	}
	if err := db.start(ctx); err != nil {
		db.release()
		return nil, fmt.Errorf("open database %s: %w", opts.Path, err)
	}
	go db.writeLoop() //nolint:contextcheck // the writer works until Close, whatever became of the context that Open had
	return db, nil
}

// start opens the connections, migrates and takes the writer's row.
func (db *DB) start(ctx context.Context) error {
	pool, err := sql.Open("sqlite", db.dsn())
	if err != nil {
		return err
	}
	db.pool = pool
	pool.SetMaxIdleConns(db.opts.Readers + 1)
	conn, err := pool.Conn(ctx)
	if isCorrupt(err) {
		return db.damaged(err)
	}
	if err != nil {
		return explain(err)
	}
	db.writer = newSession(conn)
	if err := db.checkIntegrity(ctx); err != nil {
		return err
	}
	if err := migrate(ctx, db.writer.conn, db.opts); err != nil {
		return err
	}
	if err := db.claim(ctx); err != nil {
		return err
	}
	for range db.opts.Readers {
		conn, err := pool.Conn(ctx)
		if err != nil {
			return explain(err)
		}
		if _, err := conn.ExecContext(ctx, "PRAGMA query_only = 1"); err != nil {
			return explain(errors.Join(err, conn.Close()))
		}
		db.readers <- newSession(conn)
	}
	if err := db.ballast.fill(); err != nil {
		db.log.Warn("no space could be set aside for a full disk", "error", err)
	}
	return chmodAll(db.opts.Path)
}

// dsn holds every setting that a connection needs, so that none can be opened without them.
func (db *DB) dsn() string {
	q := url.Values{}
	for _, pragma := range []string{
		fmt.Sprintf("busy_timeout(%d)", db.opts.BusyTimeout.Milliseconds()),
		"journal_mode(WAL)", "synchronous(FULL)", "foreign_keys(1)", "trusted_schema(0)", "cell_size_check(1)",
		fmt.Sprintf("wal_autocheckpoint(%d)", db.opts.WALPages), "journal_size_limit(8388608)", "cache_size(-16384)",
	} {
		q.Add("_pragma", pragma)
	}
	return (&url.URL{Scheme: "file", Path: db.opts.Path, RawQuery: q.Encode(), OmitHost: true}).String()
}

func (db *DB) checkIntegrity(ctx context.Context) error {
	var query string
	switch db.opts.Integrity {
	case IntegrityNone:
		return nil
	case IntegrityQuick:
		query = "PRAGMA quick_check(1)"
	case IntegrityFull:
		query = "PRAGMA integrity_check(1)"
	default:
		return fleet.Errorf(fleet.KindInvalid, "integrity check %q: use none, quick or full", db.opts.Integrity)
	}
	var verdict string
	if err := db.writer.conn.QueryRowContext(ctx, query).Scan(&verdict); isCorrupt(err) {
		return db.damaged(err)
	} else if err != nil {
		return explain(err)
	}
	if verdict != "ok" {
		return db.damaged(errors.New(verdict))
	}
	return nil
}

// damaged names the newest copy beside what is wrong.
func (db *DB) damaged(cause error) error {
	copies, err := filepath.Glob(db.opts.Path + ".before-*")
	if err != nil || len(copies) == 0 {
		return fleet.Wrap(cause, fleet.KindInternal, "the database is damaged; restore it from your newest backup")
	}
	return fleet.Wrap(cause, fleet.KindInternal, "the database is damaged; the newest copy beside it is %s", newest(copies))
}

func newest(paths []string) string {
	best, bestTime := "", time.Time{}
	for _, p := range paths {
		if info, err := os.Stat(p); err == nil && (best == "" || info.ModTime().After(bestTime)) {
			best, bestTime = p, info.ModTime()
		}
	}
	return best
}

// Close waits for the writes that were accepted, then lets go of the file. It is safe to call more than once.
func (db *DB) Close() error {
	db.closing.Do(func() {
		close(db.stop)
		<-db.done
		for range db.opts.Readers {
			s := <-db.readers
			s.close()
		}
		db.release()
	})
	return nil
}

// release gives back what Open took, also when it failed half-way.
func (db *DB) release() {
	if db.writer != nil {
		db.writer.close()
	}
	if db.pool != nil {
		if err := db.pool.Close(); err != nil {
			db.log.Warn("the database did not close cleanly", "error", err)
		}
	}
	if err := db.lock.release(); err != nil {
		db.log.Warn("the database's lock was not released cleanly", "error", err)
	}
}

// prepareFiles makes the directory and the file with narrow modes and refuses wider ones: the file holds hashes of tokens and
// everybody's workspaces.
func prepareFiles(path string) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fleet.Wrap(err, fleet.KindUnavailable, "the database's directory %s cannot be made", dir)
	}
	if err := checkMode(dir, 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fleet.Wrap(err, fleet.KindUnavailable, "the database %s cannot be opened for writing", path)
	}
	if err := f.Close(); err != nil {
		return err
	}
	return checkMode(path, 0o600)
}

func checkMode(path string, most fs.FileMode) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if extra := info.Mode().Perm() &^ most; extra != 0 {
		return fleet.Errorf(fleet.KindInvalid, "%s has mode %04o and others could read or change it; run: chmod %04o %s", path, info.Mode().Perm(), most, path)
	}
	return nil
}

// chmodAll narrows the files that SQLite made beside ours, which take the main file's mode where the umask lets them.
func chmodAll(path string) error {
	for _, suffix := range []string{"", "-wal", "-shm"} {
		if err := os.Chmod(path+suffix, 0o600); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Path returns the file's path.
func (db *DB) Path() string { return db.opts.Path }

// Backup writes a whole, compact copy to a path that must not exist, while everything goes on. The copy has mode 0600.
func (db *DB) Backup(ctx context.Context, path string) error {
	if _, err := os.Lstat(path); err == nil {
		return fleet.Errorf(fleet.KindExists, "%s is there already; name another file for the copy", path)
	}
	conn, err := db.pool.Conn(ctx)
	if err != nil {
		return explain(err)
	}
	defer conn.Close()
	return explain(vacuumInto(ctx, conn, path))
}

func vacuumInto(ctx context.Context, conn *sql.Conn, path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if _, err := conn.ExecContext(ctx, "VACUUM INTO ?", path); err != nil {
		return errors.Join(fmt.Errorf("copy database to %s: %w", path, err), os.Remove(path))
	}
	return syncFile(path)
}

func syncFile(path string) error {
	for _, p := range []string{path, filepath.Dir(path)} {
		f, err := os.Open(p)
		if err != nil {
			return err
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			return err
		}
	}
	return nil
}
