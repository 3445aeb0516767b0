package sqlite

import (
	"context"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

const deviceKeyQuery = `SELECT device_key.id, device_key.user, user.name, device_key.public_key, device_key.fingerprint, device_key.label, device_key.created_at
	FROM device_key JOIN user ON user.id = device_key.user WHERE device_key.revoked_at IS NULL`

func scanDeviceKey(s scanner) (k fleet.DeviceKey, err error) {
	err = s.Scan(&k.ID, &k.User, &k.UserName, &k.PublicKey, &k.Fingerprint, &k.Label, timeInto{&k.CreatedAt})
	return k, err
}

// AddDeviceKey registers an SSH key; CreatedAt is now. The same key of the same user is returned as it is, of another user KindExists.
// The hosts of the user's runs get a new generation.
func (db *DB) AddDeviceKey(ctx context.Context, key fleet.DeviceKey) (made fleet.DeviceKey, err error) {
	err = db.write(ctx, key.CreatedAt, func(t *tx) error {
		made, err = scanDeviceKey(t.row(deviceKeyQuery+` AND device_key.fingerprint = ?`, key.Fingerprint))
		if err == nil && made.User != key.User {
			return fleet.Errorf(fleet.KindExists, "this key is registered for another user; make a key of your own (`carrel login` does)")
		}
		if err == nil || !isNoRows(err) {
			return err
		}
		id, err := t.newID()
		if err != nil {
			return err
		}
		err = t.exec(`INSERT INTO device_key (id, user, public_key, fingerprint, label, created_at) VALUES (?, ?, ?, ?, ?, ?)`,
			id, key.User, key.PublicKey, key.Fingerprint, key.Label, millis(key.CreatedAt))
		if err != nil {
			return err
		}
		if err := t.bumpHostsOf(key.User); err != nil {
			return err
		}
		made, err = scanDeviceKey(t.row(deviceKeyQuery+` AND device_key.id = ?`, id))
		return err
	})
	return made, err
}

// DeviceKeys returns a user's keys that are not revoked, oldest first.
func (db *DB) DeviceKeys(ctx context.Context, user fleet.UserID) (keys []fleet.DeviceKey, err error) {
	err = db.read(ctx, func(t *tx) error {
		keys, err = t.deviceKeys(user)
		return err
	})
	return keys, err
}

func (t *tx) deviceKeys(user fleet.UserID) ([]fleet.DeviceKey, error) {
	return all(t, scanDeviceKey, deviceKeyQuery+` AND device_key.user = ? ORDER BY device_key.created_at, device_key.id`, user)
}

// RevokeDeviceKey ends a key, by id or fingerprint, of a user, or of anyone when user is empty. KindNotFound. The key is returned.
func (db *DB) RevokeDeviceKey(ctx context.Context, idOrFingerprint string, user fleet.UserID, now time.Time) (key fleet.DeviceKey, err error) {
	err = db.record(ctx, now, func(t *tx) error {
		key, err = scanDeviceKey(t.row(deviceKeyQuery+` AND (device_key.id = ?1 OR device_key.fingerprint = ?1) AND (?2 = '' OR device_key.user = ?2)`, idOrFingerprint, user))
		if isNoRows(err) {
			return fleet.Errorf(fleet.KindNotFound, "there is no key %q; `carrel key ls` shows yours", clip(idOrFingerprint))
		}
		if err != nil {
			return err
		}
		if err := t.exec(`UPDATE device_key SET revoked_at = ? WHERE id = ?`, t.now, key.ID); err != nil {
			return err
		}
		return t.bumpHostsOf(key.User)
	})
	return key, err
}
