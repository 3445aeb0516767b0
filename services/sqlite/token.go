package sqlite

import (
	"context"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

const tokenColumns = `token.id, token.user, user.name, token.label, token.created_at, token.last_used_at, token.expires_at, token.revoked_at`

func tokenInto(v *fleet.Token) []any {
	return []any{
		&v.ID, &v.User, &v.UserName, &v.Label, timeInto{&v.CreatedAt}, timeInto{&v.LastUsedAt}, timeInto{&v.ExpiresAt}, timeInto{&v.RevokedAt},
	}
}

// AddToken records a token by the SHA-256 of its secret; a missing id is drawn. The stored token is returned.
func (db *DB) AddToken(ctx context.Context, token fleet.Token, hash []byte) (fleet.Token, error) {
	err := db.write(ctx, token.CreatedAt, func(t *tx) error {
		if token.ID == "" {
			id, err := t.newID()
			if err != nil {
				return err
			}
			token.ID = id
		}
		return t.exec(`INSERT INTO token (id, user, label, hash, created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?)`,
			token.ID, token.User, token.Label, hash, millis(token.CreatedAt), timeArg(token.ExpiresAt))
	})
	return token, err
}

// TokenByHash returns a token that is good now, and its user. KindUnauthenticated with a sentence for any other.
func (db *DB) TokenByHash(ctx context.Context, hash []byte, now time.Time) (token fleet.Token, u fleet.User, err error) {
	err = db.read(ctx, func(t *tx) error {
		dest := append(tokenInto(&token), userInto(&u)...)
		err := t.row(`SELECT `+tokenColumns+`, `+userColumns+` FROM token JOIN user ON user.id = token.user WHERE token.hash = ?`, hash).Scan(dest...)
		if isNoRows(err) {
			return fleet.Errorf(fleet.KindUnauthenticated, "this token is not known here; run `carrel login`")
		}
		return err
	})
	if err != nil {
		return token, u, err
	}
	switch {
	case !token.RevokedAt.IsZero():
		err = fleet.Errorf(fleet.KindUnauthenticated, "this token was revoked; run `carrel login`")
	case !token.ExpiresAt.IsZero() && !now.Before(token.ExpiresAt):
		err = fleet.Errorf(fleet.KindUnauthenticated, "this token has expired; run `carrel login`")
	case !u.DeletedAt.IsZero():
		err = fleet.Errorf(fleet.KindUnauthenticated, "this account was removed")
	case u.Disabled:
		err = fleet.Errorf(fleet.KindUnauthenticated, "this account is disabled; ask an admin")
	}
	return token, u, err
}

// TouchToken notes when a token was used; callers do so about once a minute.
func (db *DB) TouchToken(ctx context.Context, id string, now time.Time) error {
	return db.write(ctx, now, func(t *tx) error {
		return t.exec(`UPDATE token SET last_used_at = max(coalesce(last_used_at, 0), ?) WHERE id = ?`, t.now, id)
	})
}

// Tokens returns a user's tokens that are not revoked, newest first.
func (db *DB) Tokens(ctx context.Context, user fleet.UserID) (tokens []fleet.Token, err error) {
	err = db.read(ctx, func(t *tx) error {
		tokens, err = all(t, scanWith(tokenInto),
			`SELECT `+tokenColumns+` FROM token JOIN user ON user.id = token.user WHERE token.user = ? AND token.revoked_at IS NULL ORDER BY token.created_at DESC, token.id`, user)
		return err
	})
	return tokens, err
}

// RevokeToken ends a token of a user, or of anyone when user is empty. KindNotFound; revoking twice is no error.
func (db *DB) RevokeToken(ctx context.Context, id string, user fleet.UserID, now time.Time) error {
	return db.record(ctx, now, func(t *tx) error {
		n, err := t.affect(`UPDATE token SET revoked_at = coalesce(revoked_at, ?) WHERE id = ? AND (? = '' OR user = ?)`, t.now, id, user, user)
		if err == nil && n == 0 {
			return fleet.Errorf(fleet.KindNotFound, "there is no token %q; `carrel token ls` shows yours", clip(id))
		}
		return err
	})
}

// AddSignIn records a one-time sign-in by the SHA-256 of its code.
func (db *DB) AddSignIn(ctx context.Context, user fleet.UserID, hash []byte, expires, now time.Time) error {
	return db.write(ctx, now, func(t *tx) error {
		if err := t.exec(`DELETE FROM sign_in WHERE expires_at < ?`, t.now-(7*24*time.Hour).Milliseconds()); err != nil {
			return err
		}
		return t.exec(`INSERT INTO sign_in (hash, user, expires_at) VALUES (?, ?, ?)`, hash, user, millis(expires))
	})
}

// UseSignIn takes a one-time sign-in; it works once. KindUnauthenticated with a sentence.
func (db *DB) UseSignIn(ctx context.Context, hash []byte, now time.Time) (u fleet.User, err error) {
	err = db.write(ctx, now, func(t *tx) error {
		var expires, used time.Time
		dest := append([]any{timeInto{&expires}, timeInto{&used}}, userInto(&u)...)
		err := t.row(`SELECT sign_in.expires_at, sign_in.used_at, `+userColumns+` FROM sign_in JOIN user ON user.id = sign_in.user WHERE sign_in.hash = ?`, hash).Scan(dest...)
		switch {
		case isNoRows(err):
			return fleet.Errorf(fleet.KindUnauthenticated, "this sign-in is not known here; ask an admin for another (`carrel user sign-in NAME`)")
		case err != nil:
			return err
		case !used.IsZero():
			return fleet.Errorf(fleet.KindUnauthenticated, "this sign-in was used already; ask an admin for another (`carrel user sign-in %s`)", u.Name)
		case !fromMillis(t.now).Before(expires):
			return fleet.Errorf(fleet.KindUnauthenticated, "this sign-in has expired; ask an admin for another (`carrel user sign-in %s`)", u.Name)
		case u.Disabled || !u.DeletedAt.IsZero():
			return fleet.Errorf(fleet.KindUnauthenticated, "this account is disabled; ask an admin")
		}
		return t.exec(`UPDATE sign_in SET used_at = ? WHERE hash = ?`, t.now, hash)
	})
	return u, err
}
