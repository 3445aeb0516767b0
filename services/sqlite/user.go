package sqlite

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

const userColumns = `user.id, user.name, user.login, user.uid, user.gid, user.groups, user.role, user.project, user.gpu_limit, user.disabled, user.created_at, user.deleted_at`

func scanUser(s scanner) (fleet.User, error) {
	var u fleet.User
	err := s.Scan(userInto(&u)...)
	return u, err
}

func userInto(u *fleet.User) []any {
	return []any{
		&u.ID, &u.Name, &u.Login, &u.UID, &u.GID,
		jsonInto{&u.Groups},
		&u.Role, &u.Project, &u.GPULimit, &u.Disabled,
		timeInto{&u.CreatedAt},
		timeInto{&u.DeletedAt},
	}
}

// UserOutcome is what became of one account asked for.
type UserOutcome = fleet.UserOutcome

// AddUsers makes accounts. A missing login is the name, a missing uid the next of the automatic range, a missing gid the uid. Without
// partial, one fault makes none of them, and the error is nil: the outcomes tell.
func (db *DB) AddUsers(ctx context.Context, users []fleet.User, partial bool, now time.Time) ([]UserOutcome, error) {
	outcomes := make([]UserOutcome, len(users))
	err := db.write(ctx, now, func(t *tx) error {
		faults := 0
		for i, u := range users {
			made, err := t.addUser(u)
			outcomes[i] = UserOutcome{User: made, Err: err}
			if err == nil {
				continue
			}
			if fleet.KindOf(err) == fleet.KindInternal {
				return err
			}
			faults++
		}
		if faults > 0 && !partial {
			return errNoneMade
		}
		return nil
	})
	if errors.Is(err, errNoneMade) {
		for i := range outcomes {
			if outcomes[i].Err == nil {
				outcomes[i] = UserOutcome{User: users[i], Err: fleet.Errorf(fleet.KindConflict, "not made, since others of the list are wrong")}
			}
		}
		return outcomes, nil
	}
	return outcomes, err
}

var errNoneMade = fleet.Errorf(fleet.KindConflict, "some accounts are wrong; none was made")

func (t *tx) addUser(u fleet.User) (fleet.User, error) {
	asked := u
	if u.Login == "" {
		u.Login = u.Name
	}
	if u.Role == "" {
		u.Role = fleet.RoleMember
	}
	if u.Project == "" {
		u.Project = fleet.DefaultProject
	}
	if u.UID == 0 {
		uid, err := t.nextUID()
		if err != nil {
			return asked, err
		}
		u.UID = uid
	}
	if u.GID == 0 {
		u.GID = u.UID
	}
	if err := t.checkUser(&u, ""); err != nil {
		return asked, err
	}
	id, err := t.newID()
	if err != nil {
		return asked, err
	}
	u.ID, u.CreatedAt = fleet.UserID(id), fromMillis(t.now)
	err = t.exec(`INSERT INTO user (id, name, login, uid, gid, groups, role, project, gpu_limit, disabled, created_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		u.ID, u.Name, u.Login, u.UID, u.GID, jsonArg(u.Groups), u.Role, u.Project, u.GPULimit, u.Disabled, t.now)
	if err != nil {
		return asked, fmt.Errorf("add user %s: %w", u.Name, err)
	}
	return u, t.joinProject(u.Project, u.ID)
}

// nextUID is one above the highest that was ever given from the automatic range, so that files of a removed user get no new owner.
func (t *tx) nextUID() (int64, error) {
	var highest int64
	err := t.row(`SELECT coalesce(max(uid), ?) FROM user WHERE uid BETWEEN ? AND ?`, fleet.FirstAutoUID-1, fleet.FirstAutoUID, fleet.LastAutoUID).Scan(&highest)
	if err != nil {
		return 0, err
	}
	if highest >= fleet.LastAutoUID {
		return 0, fleet.Errorf(fleet.KindExhausted, "all automatic uids from %d to %d were given; name a uid", fleet.FirstAutoUID, fleet.LastAutoUID)
	}
	return highest + 1, nil
}

// checkUser holds an account against the rules and the other accounts.
func (t *tx) checkUser(u *fleet.User, self fleet.UserID) error {
	if err := fleet.CheckName("user", u.Name); err != nil {
		return err
	}
	if err := fleet.CheckLogin(u.Login); err != nil {
		return err
	}
	switch {
	case u.UID < fleet.LowestUID:
		return fleet.Errorf(fleet.KindInvalid, "uid %d of user %s: use %d or more", u.UID, u.Name, fleet.LowestUID)
	case u.UID > 1<<31-2 || u.GID > 1<<31-2:
		return fleet.Errorf(fleet.KindInvalid, "uid and gid of user %s: use at most %d", u.Name, 1<<31-2)
	case u.GID < fleet.LowestUID:
		return fleet.Errorf(fleet.KindInvalid, "gid %d of user %s: use %d or more, or none for the uid's; lower ones are groups of the system", u.GID, u.Name, fleet.LowestUID)
	case u.Role != fleet.RoleMember && u.Role != fleet.RoleAdmin:
		return fleet.Errorf(fleet.KindInvalid, "role %q of user %s: use member or admin", u.Role, u.Name)
	case u.GPULimit != nil && *u.GPULimit < 0:
		return fleet.Errorf(fleet.KindInvalid, "device limit %d of user %s: use 0 or more", *u.GPULimit, u.Name)
	}
	if err := t.needProject(u.Project); err != nil {
		return err
	}
	return t.checkUserUnique(u, self)
}

func (t *tx) checkUserUnique(u *fleet.User, self fleet.UserID) error {
	others, err := all(t, scanUser, `SELECT `+userColumns+` FROM user WHERE deleted_at IS NULL AND id <> ?1 AND (name = ?2 OR login = ?3 OR uid = ?4)`, self, u.Name, u.Login, u.UID)
	if err != nil {
		return err
	}
	for _, o := range others {
		switch {
		case o.Name == u.Name:
			return fleet.Errorf(fleet.KindExists, "there is a user %s already", u.Name)
		case o.Login == u.Login:
			return fleet.Errorf(fleet.KindExists, "login %s belongs to user %s; give %s another login", u.Login, o.Name, u.Name)
		case o.UID == u.UID:
			return fleet.Errorf(fleet.KindExists, "uid %d belongs to user %s; give %s another uid, or none", u.UID, o.Name, u.Name)
		}
	}
	return nil
}

// User returns an account by id, also a removed one. KindNotFound.
func (db *DB) User(ctx context.Context, id fleet.UserID) (u fleet.User, err error) {
	err = db.read(ctx, func(t *tx) error {
		u, err = t.user(id)
		return err
	})
	return u, err
}

func (t *tx) user(id fleet.UserID) (fleet.User, error) {
	u, err := scanUser(t.row(`SELECT `+userColumns+` FROM user WHERE id = ?`, id))
	if isNoRows(err) {
		return u, fleet.Errorf(fleet.KindNotFound, "there is no user with id %s", id)
	}
	return u, err
}

// UserByName returns an account that is not removed. KindNotFound.
func (db *DB) UserByName(ctx context.Context, name string) (u fleet.User, err error) {
	err = db.read(ctx, func(t *tx) error {
		u, err = t.userByName(name)
		return err
	})
	return u, err
}

func (t *tx) userByName(name string) (fleet.User, error) {
	u, err := scanUser(t.row(`SELECT `+userColumns+` FROM user WHERE name = ? AND deleted_at IS NULL`, name))
	if isNoRows(err) {
		return u, fleet.Errorf(fleet.KindNotFound, "there is no user %q; `carrel user ls` shows all", clip(name))
	}
	return u, err
}

// Users returns a page of accounts by name; after is from the page before.
func (db *DB) Users(ctx context.Context, limit int, after string) (users []fleet.User, next string, err error) {
	limit = pageSize(limit)
	err = db.read(ctx, func(t *tx) error {
		users, err = all(t, scanUser, `SELECT `+userColumns+` FROM user WHERE deleted_at IS NULL AND name > ? ORDER BY name LIMIT ?`, after, limit+1)
		return err
	})
	if len(users) > limit {
		users = users[:limit]
		next = users[limit-1].Name
	}
	return users, next, err
}

const (
	defaultPage = 200
	largestPage = 1000
)

func pageSize(asked int) int {
	if asked <= 0 {
		return defaultPage
	}
	return min(asked, largestPage)
}

// UpdateUser changes an account. KindConflict when it would leave no admin who can sign in; KindExists for a login or uid of another.
// Hosts of the user's runs get a new generation, since keys and identity go with them.
func (db *DB) UpdateUser(ctx context.Context, name string, change func(*fleet.User) error, now time.Time) (u fleet.User, err error) {
	err = db.record(ctx, now, func(t *tx) error {
		u, err = t.userByName(name)
		if err != nil {
			return err
		}
		before := u
		if err := change(&u); err != nil {
			return err
		}
		u.ID, u.CreatedAt = before.ID, before.CreatedAt
		if err := t.checkUser(&u, before.ID); err != nil {
			return err
		}
		if err := t.keepOneAdmin(&before, &u); err != nil {
			return err
		}
		if err := t.storeUser(&u); err != nil {
			return err
		}
		return t.bumpHostsOf(u.ID)
	})
	return u, err
}

func (t *tx) storeUser(u *fleet.User) error {
	err := t.exec(`UPDATE user SET name = ?, login = ?, uid = ?, gid = ?, groups = ?, role = ?, project = ?, gpu_limit = ?, disabled = ?, deleted_at = ? WHERE id = ?`,
		u.Name, u.Login, u.UID, u.GID, jsonArg(u.Groups), u.Role, u.Project, u.GPULimit, u.Disabled, timeArg(u.DeletedAt), u.ID)
	if err != nil {
		return fmt.Errorf("change user %s: %w", u.Name, err)
	}
	return t.joinProject(u.Project, u.ID)
}

func (t *tx) keepOneAdmin(before, after *fleet.User) error {
	acts := func(u *fleet.User) bool { return u.Role == fleet.RoleAdmin && !u.Disabled && u.DeletedAt.IsZero() }
	if !acts(before) || acts(after) {
		return nil
	}
	var others int
	err := t.row(`SELECT count(*) FROM user WHERE role = 'admin' AND disabled = 0 AND deleted_at IS NULL AND id <> ?`, before.ID).Scan(&others)
	if err != nil {
		return err
	}
	if others == 0 {
		return fleet.Errorf(fleet.KindConflict, "%s is the last admin; make another admin first", before.Name)
	}
	return nil
}

// FirstAdmin returns the first admin, made now under this name when there is no admin at all.
func (db *DB) FirstAdmin(ctx context.Context, name string, now time.Time) (u fleet.User, created bool, err error) {
	err = db.write(ctx, now, func(t *tx) error {
		created = false
		u, err = scanUser(t.row(`SELECT ` + userColumns + ` FROM user WHERE role = 'admin' AND deleted_at IS NULL ORDER BY disabled, created_at, id LIMIT 1`))
		if !isNoRows(err) {
			return err
		}
		created = true
		u, err = t.addUser(fleet.User{Name: name, Role: fleet.RoleAdmin})
		return err
	})
	return u, created && err == nil, err
}

// bumpHostsOf gives the hosts of a user's runs a new generation.
func (t *tx) bumpHostsOf(user fleet.UserID) error {
	return t.exec(`UPDATE host SET generation = generation + 1 WHERE id IN (
		SELECT run.host FROM run JOIN workspace ON workspace.id = run.workspace WHERE run.host_clear = 0 AND run.host IS NOT NULL AND workspace.owner = ?)`, user)
}

// HostsOfUser returns the hosts that hold runs of a user, which have to be told when keys or identity change.
func (db *DB) HostsOfUser(ctx context.Context, user fleet.UserID) (hosts []fleet.HostID, err error) {
	err = db.read(ctx, func(t *tx) error {
		hosts, err = all(t, scanString[fleet.HostID], `SELECT DISTINCT run.host FROM run JOIN workspace ON workspace.id = run.workspace
			WHERE run.host_clear = 0 AND run.host IS NOT NULL AND workspace.owner = ? ORDER BY run.host`, user)
		return err
	})
	return hosts, err
}

// clip keeps an echoed input short.
func clip(s string) string {
	if r := []rune(s); len(r) > 40 {
		return string(r[:40]) + "…"
	}
	return s
}

// list joins names for a message, at most ten.
func list[T ~string](names []T) string {
	texts := make([]string, 0, len(names))
	for _, n := range names[:min(len(names), 10)] {
		texts = append(texts, string(n))
	}
	if len(names) > 10 {
		texts = append(texts, fmt.Sprintf("and %d more", len(names)-10))
	}
	return strings.Join(slices.Clip(texts), ", ")
}
