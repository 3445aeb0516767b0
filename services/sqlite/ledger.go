package sqlite

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/carrel-dev/carrel/services/fleet"
)

// fact is a ledger row as hashed.
type fact struct {
	lease           fleet.LeaseID
	kind            fleet.FactKind
	at, committedAt int64
	user            fleet.UserID
	project         string
	pool            string
	model           string
	workspace       fleet.WorkspaceID
}

// hash covers the row before and all fields of this one, each with its length, so that a changed, missing or exchanged row is found.
func (f *fact) hash(before []byte) []byte {
	h := sha256.New()
	h.Write(before)
	var number [8]byte
	for _, n := range []int64{int64(f.lease), f.at, f.committedAt} {
		binary.BigEndian.PutUint64(number[:], uint64(n))
		h.Write(number[:])
	}
	for _, s := range []string{string(f.kind), string(f.user), f.project, f.pool, f.model, string(f.workspace)} {
		binary.BigEndian.PutUint64(number[:], uint64(len(s)))
		h.Write(number[:])
		h.Write([]byte(s))
	}
	return h.Sum(nil)
}

// addFact appends a fact with the lease's present key, committed now.
func (t *tx) addFact(lease fleet.LeaseID, kind fleet.FactKind, at int64) error {
	f := fact{lease: lease, kind: kind, at: at, committedAt: t.now}
	err := t.row(`SELECT user, project, pool, model, workspace FROM lease WHERE id = ?`, lease).Scan(&f.user, &f.project, &f.pool, &f.model, &f.workspace)
	if err != nil {
		return err
	}
	before := t.lastHash
	if before == nil {
		if err := t.row(`SELECT hash FROM ledger ORDER BY id DESC LIMIT 1`).Scan(&before); err != nil && !isNoRows(err) {
			return err
		}
	}
	hash := f.hash(before)
	err = t.exec(`INSERT INTO ledger (lease, kind, at, committed_at, user, project, pool, model, workspace, hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		f.lease, f.kind, f.at, f.committedAt, f.user, f.project, f.pool, f.model, f.workspace, hash)
	if err != nil {
		return fmt.Errorf("ledger fact %s of lease %d: %w", kind, lease, err)
	}
	t.lastHash = hash
	return nil
}
