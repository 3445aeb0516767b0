package sqlite

import (
	"context"
	"crypto/ed25519"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

const hostColumns = `host.id, host.name, host.pool, host.public_key, host.session, host.generation, host.after_seq, host.journal_id, host.boot_id,
	host.draining, host.fenced, host.last_seen, host.agent_version, host.engine_version, host.os, host.cpus, host.memory_mib,
	host.reserved_cpu_millis, host.reserved_memory_mib, host.disk_free_mib, host.gpu_source, host.driver_version, host.cuda_version,
	host.problems, host.unmanaged, host.clock_skew_ms, host.joined_at`

func scanHost(s scanner) (fleet.Host, error) {
	var h fleet.Host
	err := s.Scan(&h.ID, &h.Name, &h.Pool, &h.PublicKey, &h.Session, &h.Generation, &h.AfterSeq, &h.JournalID, &h.BootID,
		&h.Draining, &h.Fenced, timeInto{&h.LastSeen}, &h.AgentVersion, &h.EngineVersion, &h.OS, &h.CPUs, &h.MemoryMiB,
		&h.ReservedCPUMillis, &h.ReservedMemoryMiB, &h.DiskFreeMiB, &h.GPUSource, &h.DriverVersion, &h.CUDAVersion,
		jsonInto{&h.Problems}, jsonInto{&h.Unmanaged}, durationInto{&h.ClockSkew}, timeInto{&h.JoinedAt})
	return h, err
}

// Host returns one by id or name. KindNotFound.
func (db *DB) Host(ctx context.Context, idOrName string) (h fleet.Host, err error) {
	err = db.read(ctx, func(t *tx) error {
		h, err = scanHost(t.row(`SELECT `+hostColumns+` FROM host WHERE id = ?1 OR name = ?1 ORDER BY id = ?1 DESC LIMIT 1`, idOrName))
		if isNoRows(err) {
			return fleet.Errorf(fleet.KindNotFound, "there is no host %q; `carrel host ls` shows all", clip(idOrName))
		}
		return err
	})
	return h, err
}

func (t *tx) host(id fleet.HostID) (fleet.Host, error) {
	h, err := scanHost(t.row(`SELECT `+hostColumns+` FROM host WHERE id = ?`, id))
	if isNoRows(err) {
		return h, fleet.Errorf(fleet.KindNotFound, "there is no host with id %s", clip(string(id)))
	}
	return h, err
}

// Hosts returns all by name.
func (db *DB) Hosts(ctx context.Context) (hosts []fleet.Host, err error) {
	err = db.read(ctx, func(t *tx) error {
		hosts, err = all(t, scanHost, `SELECT `+hostColumns+` FROM host ORDER BY name`)
		return err
	})
	return hosts, err
}

// SetDraining keeps new runs off a host, or lets them on again. KindNotFound.
func (db *DB) SetDraining(ctx context.Context, id fleet.HostID, draining bool, now time.Time) error {
	return db.record(ctx, now, func(t *tx) error {
		n, err := t.affect(`UPDATE host SET draining = ? WHERE id = ?`, draining, id)
		if err == nil && n == 0 {
			return fleet.Errorf(fleet.KindNotFound, "there is no host with id %s", clip(string(id)))
		}
		return err
	})
}

// Seen notes that a host answered.
func (db *DB) Seen(ctx context.Context, id fleet.HostID, now time.Time) error {
	return db.write(ctx, now, func(t *tx) error {
		return t.exec(`UPDATE host SET last_seen = max(coalesce(last_seen, 0), ?) WHERE id = ?`, t.now, id)
	})
}

// BeginSession starts a new session of a host and returns it, with the sequence number to observe after and the journal that it counts in.
func (db *DB) BeginSession(ctx context.Context, id fleet.HostID, now time.Time) (session, afterSeq int64, journalID string, err error) {
	err = db.record(ctx, now, func(t *tx) error {
		err := t.row(`UPDATE host SET session = session + 1, last_seen = max(coalesce(last_seen, 0), ?) WHERE id = ? RETURNING session, after_seq, journal_id`, t.now, id).
			Scan(&session, &afterSeq, &journalID)
		if isNoRows(err) {
			return fleet.Errorf(fleet.KindNotFound, "there is no host with id %s", clip(string(id)))
		}
		return err
	})
	return session, afterSeq, journalID, err
}

// JoinToken lets one host join.
type JoinToken = fleet.JoinGrant

// AddJoinToken records a token. KindNotFound for an unknown pool.
func (db *DB) AddJoinToken(ctx context.Context, token JoinToken) error {
	return db.write(ctx, fromMillis(0), func(t *tx) error {
		pool, err := t.poolByName(token.Pool)
		if err != nil {
			return err
		}
		return t.exec(`INSERT INTO join_token (hash, pool, host, expires_at) VALUES (?, ?, ?, ?)`, token.Hash, pool.Name, token.Host, millis(token.ExpiresAt))
	})
}

// JoinHost takes a join token and records the host, in one transaction, so that of many joins with one token one succeeds.
// KindUnauthenticated for a token that is not good, KindExists for a name that another host has. A token that names a host which is
// there already gives it a new key: the same machine, installed anew.
func (db *DB) JoinHost(ctx context.Context, hash []byte, name string, publicKey []byte, version string, now time.Time) (h fleet.Host, err error) {
	err = db.write(ctx, now, func(t *tx) error {
		pool, err := t.useJoinToken(hash, name)
		if err != nil {
			return err
		}
		h, err = t.addHost(name, pool.pool, publicKey, version)
		if fleet.IsKind(err, fleet.KindExists) && pool.host == name {
			h, err = t.rejoin(name, publicKey, version)
		}
		if err != nil {
			return err
		}
		return t.exec(`UPDATE join_token SET used_at = ?, used_by = ? WHERE hash = ?`, t.now, h.ID, hash)
	})
	return h, err
}

// joinPlace is where a join token lets in.
type joinPlace struct{ pool, host string }

func (t *tx) useJoinToken(hash []byte, name string) (place joinPlace, err error) {
	var expires, used time.Time
	err = t.row(`SELECT pool, host, expires_at, used_at FROM join_token WHERE hash = ?`, hash).Scan(&place.pool, &place.host, timeInto{&expires}, timeInto{&used})
	const another = "make another with `carrel host token`"
	switch {
	case isNoRows(err):
		return place, fleet.Errorf(fleet.KindUnauthenticated, "this join token is not known here; %s", another)
	case err != nil:
		return place, err
	case !used.IsZero():
		return place, fleet.Errorf(fleet.KindUnauthenticated, "this join token was used already; %s", another)
	case !fromMillis(t.now).Before(expires):
		return place, fleet.Errorf(fleet.KindUnauthenticated, "this join token has expired; %s", another)
	case place.host != "" && place.host != name:
		return place, fleet.Errorf(fleet.KindUnauthenticated, "this join token is for host %s, not for %s", place.host, clip(name))
	}
	return place, nil
}

// rejoin gives a host a new key. What it held is settled by what its agent reports.
func (t *tx) rejoin(name string, publicKey []byte, version string) (fleet.Host, error) {
	if err := t.exec(`UPDATE host SET public_key = ?, agent_version = ?, session = session + 1 WHERE name = ?`, publicKey, version, name); err != nil {
		return fleet.Host{}, err
	}
	return scanHost(t.row(`SELECT `+hostColumns+` FROM host WHERE name = ?`, name))
}

func checkHostName(name string) error {
	if name == "" || len(name) > 63 {
		return fleet.Errorf(fleet.KindInvalid, "host name %q: use 1 to 63 characters", clip(name))
	}
	for _, c := range name {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '.' && c != '_' {
			return fleet.Errorf(fleet.KindInvalid, "host name %q: use lower-case letters, digits, `-`, `_` and `.`", clip(name))
		}
	}
	return nil
}

func (t *tx) addHost(name, pool string, publicKey []byte, version string) (fleet.Host, error) {
	if err := checkHostName(name); err != nil {
		return fleet.Host{}, err
	}
	if len(publicKey) != ed25519.PublicKeySize {
		return fleet.Host{}, fleet.Errorf(fleet.KindInvalid, "the host's public key has %d bytes; an ed25519 key has %d", len(publicKey), ed25519.PublicKeySize)
	}
	id, err := t.newID()
	if err != nil {
		return fleet.Host{}, err
	}
	err = t.exec(`INSERT INTO host (id, name, pool, public_key, session, generation, after_seq, journal_id, boot_id, draining, fenced,
		agent_version, engine_version, os, cpus, memory_mib, reserved_cpu_millis, reserved_memory_mib, disk_free_mib,
		gpu_source, driver_version, cuda_version, problems, unmanaged, clock_skew_ms, joined_at)
		VALUES (?, ?, ?, ?, 0, 1, 0, '', '', 0, 0, ?, '', '', 0, 0, 0, 0, 0, '', '', '', '[]', '[]', 0, ?)`, id, name, pool, publicKey, version, t.now)
	if isUnique(err) {
		return fleet.Host{}, fleet.Errorf(fleet.KindExists, "there is a host %s already; join under another name", name)
	}
	if err != nil {
		return fleet.Host{}, err
	}
	return t.host(fleet.HostID(id))
}

// EnsureLocalHost returns the host of this name, made now if there is none, with this key: for a gateway and agent in one process,
// which trust each other.
func (db *DB) EnsureLocalHost(ctx context.Context, name, pool string, publicKey []byte, now time.Time) (h fleet.Host, err error) {
	err = db.write(ctx, now, func(t *tx) error {
		h, err = scanHost(t.row(`SELECT `+hostColumns+` FROM host WHERE name = ?`, name))
		if isNoRows(err) {
			p, err := t.poolByName(pool)
			if err != nil {
				return err
			}
			h, err = t.addHost(name, p.Name, publicKey, "")
			return err
		}
		if err != nil {
			return err
		}
		h.PublicKey = publicKey
		return t.exec(`UPDATE host SET public_key = ? WHERE id = ?`, publicKey, h.ID)
	})
	return h, err
}
