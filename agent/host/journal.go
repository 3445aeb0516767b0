package host

import (
	"cmp"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
)

// seqBlock is how many sequence numbers are claimed on disk ahead of use. What was sent under a number that never reached the
// disk is thereby never sent again under the same one.
const seqBlock = 10_000

// Journal is what the agent must not forget: the highest stamp, what became of each run, and the sequence numbers of its
// reports. A change is on disk when Commit returns.
type Journal struct {
	path string

	mu      sync.Mutex
	state   journalState
	version int64         // of state
	changed chan struct{} // closed and replaced when a sequence number was given out

	writing sync.Mutex // held around a write; taken before mu
	written int64      // version on disk, guarded by writing
}

type journalState struct {
	ID      string             `json:"journal_id"`
	Stamp   Stamp              `json:"stamp"`
	Applied bool               `json:"applied"` // a set was accepted once
	Seq     int64              `json:"seq"`
	Ceiling int64              `json:"ceiling"` // sequence numbers up to it are claimed
	Records map[string]*Record `json:"records"`
	Made    map[string]bool    `json:"volumes_made"`    // volumes whose directory was made here
	Removed map[string]int64   `json:"volumes_removed"` // volume id to sequence number, until acknowledged and no longer asked for
}

// OpenJournal reads the journal of a data directory, or begins one. A journal that cannot be read is an error: a new one
// would forget which containers are ours.
func OpenJournal(dir string, now Moment) (*Journal, error) {
	j := &Journal{path: filepath.Join(dir, "journal.json"), changed: make(chan struct{})}
	content, err := os.ReadFile(j.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		// Numbers begin at the time, so that they exceed those of a journal that was lost.
		j.state = journalState{ID: rand.Text(), Seq: now.Wall.UnixMilli()}
	case err != nil:
		return nil, fmt.Errorf("read the journal: %w", err)
	default:
		if err := json.Unmarshal(content, &j.state); err != nil {
			return nil, fmt.Errorf("the journal %s cannot be read; move it away to begin a new one, after which containers "+
				"that run now must be ended by hand: %w", j.path, err)
		}
	}
	if j.state.Records == nil {
		j.state.Records = map[string]*Record{}
	}
	if j.state.Made == nil {
		j.state.Made = map[string]bool{}
	}
	if j.state.Removed == nil {
		j.state.Removed = map[string]int64{}
	}
	j.state.Seq = max(j.state.Seq, j.state.Ceiling)
	j.version = 1
	return j, j.Commit()
}

// ID is random, made with the journal.
func (j *Journal) ID() string { return j.state.ID }

// Commit puts all changes so far on disk. Callers that come while one writes share the next write.
func (j *Journal) Commit() error {
	j.mu.Lock()
	want := j.version
	j.mu.Unlock()
	j.writing.Lock()
	defer j.writing.Unlock()
	if j.written >= want {
		return nil
	}
	j.mu.Lock()
	if j.state.Ceiling < j.state.Seq+seqBlock/2 {
		j.state.Ceiling = j.state.Seq + seqBlock
	}
	version := j.version
	content, err := json.Marshal(&j.state)
	j.mu.Unlock()
	if err != nil {
		return fmt.Errorf("write the journal: %w", err)
	}
	if err := WriteDurably(j.path, content, 0o600); err != nil {
		return Wrap(err, KindUnavailable, "the agent cannot write its journal (is the disk of %s full?)", filepath.Dir(j.path))
	}
	j.written = version
	return nil
}

// Stamp is the highest seen; applied tells whether there was one.
func (j *Journal) Stamp() (s Stamp, applied bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.state.Stamp, j.state.Applied
}

// SetStamp puts a stamp on disk, and refuses one that is less than the highest seen.
func (j *Journal) SetStamp(s Stamp) error {
	j.mu.Lock()
	if j.state.Applied && s.Less(j.state.Stamp) {
		highest := j.state.Stamp
		j.mu.Unlock()
		return Errorf(KindStale, "stamp %v is older than %v, which this host has already seen; if the gateway's database was put back from an older copy, stop the gateway and run `carreld recover`", s, highest)
	}
	if j.state.Stamp != s || !j.state.Applied {
		j.state.Stamp, j.state.Applied = s, true
		j.version++
	}
	j.mu.Unlock()
	return j.Commit()
}

// Record returns a copy of what is known about a run.
func (j *Journal) Record(k Key) (Record, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	r := j.state.Records[k.String()]
	if r == nil {
		return Record{}, false
	}
	return r.clone(), true
}

// Records returns copies of all records that keep holds true for, by sequence number.
func (j *Journal) Records(keep func(*Record) bool) []Record {
	j.mu.Lock()
	defer j.mu.Unlock()
	var out []Record
	for _, r := range j.state.Records {
		if keep(r) {
			out = append(out, r.clone())
		}
	}
	slices.SortFunc(out, func(a, b Record) int { return cmp.Compare(a.Seq, b.Seq) })
	return out
}

// Change changes a run's record in memory, making it where there is none, and gives it the next sequence number. The change
// is reported at once, and on disk with the next Commit.
func (j *Journal) Change(k Key, change func(*Record)) Record {
	j.mu.Lock()
	defer j.mu.Unlock()
	r := j.state.Records[k.String()]
	if r == nil {
		r = &Record{Key: k}
		j.state.Records[k.String()] = r
	}
	change(r)
	r.Seq = j.next()
	return r.clone()
}

// Note changes a record that exists without giving it a new number: nobody is told.
func (j *Journal) Note(k Key, change func(*Record)) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if r := j.state.Records[k.String()]; r != nil {
		change(r)
		j.version++
	}
}

// next gives out a sequence number. The caller holds the lock.
func (j *Journal) next() int64 {
	j.state.Seq++
	j.version++
	close(j.changed)
	j.changed = make(chan struct{})
	return j.state.Seq
}

// Seq is the last number given out; changed is closed with the next one.
func (j *Journal) Seq() (seq int64, changed <-chan struct{}) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.state.Seq, j.changed
}

// Acknowledge drops what the gateway has committed and no longer asks for. Nothing is dropped before the first set came.
func (j *Journal) Acknowledge(seq int64, wanted func(Key) bool, volumeWanted func(string) bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.state.Applied || seq > j.state.Seq {
		return // numbers of another journal
	}
	for name, r := range j.state.Records {
		if r.Phase == PhaseGone && r.Seq <= seq && !wanted(r.Key) {
			delete(j.state.Records, name)
			j.version++
		}
	}
	for id, removed := range j.state.Removed {
		if removed <= seq && !volumeWanted(id) {
			delete(j.state.Removed, id)
			j.version++
		}
	}
}

// VolumeMade notes that a volume's directory was made.
func (j *Journal) VolumeMade(id string) error {
	j.mu.Lock()
	if !j.state.Made[id] {
		j.state.Made[id] = true
		j.version++
	}
	delete(j.state.Removed, id)
	j.mu.Unlock()
	return j.Commit()
}

// MadeVolume reports whether a volume's directory was made here and not removed since.
func (j *Journal) MadeVolume(id string) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.state.Made[id]
}

// VolumeRemoved notes that a volume's data is gone.
func (j *Journal) VolumeRemoved(id string) error {
	j.mu.Lock()
	delete(j.state.Made, id)
	if _, known := j.state.Removed[id]; !known {
		j.state.Removed[id] = j.next()
	}
	j.mu.Unlock()
	return j.Commit()
}

// RemovedVolumes returns the volumes whose removal has a number above after.
func (j *Journal) RemovedVolumes(after int64) []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	var out []string
	for id, seq := range j.state.Removed {
		if seq > after {
			out = append(out, id)
		}
	}
	slices.Sort(out)
	return out
}

// WriteDurably replaces a file so that a crash leaves the old or the new one, and returns when the new one is on disk.
func WriteDurably(path string, content []byte, mode fs.FileMode) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = f.Write(content)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(dir)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
