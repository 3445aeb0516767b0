package sqlite_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/sqlite"
)

func TestAddUsersAllOrNone(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	ask := []fleet.User{{Name: "cleo"}, {Name: "bo"}, {Name: "Dan"}, {Name: "eve", UID: 500}, {Name: "fay", Login: "ana"}, {Name: "gus", UID: r.ana.UID}, {Name: "hal", Project: "none"}}
	outcomes, err := r.AddUsers(ctx, ask, false, r.now)
	r.ok(err)
	kinds := []fleet.Kind{fleet.KindConflict, fleet.KindExists, fleet.KindInvalid, fleet.KindInvalid, fleet.KindExists, fleet.KindExists, fleet.KindNotFound}
	for i, o := range outcomes {
		if !fleet.IsKind(o.Err, kinds[i]) {
			t.Errorf("%s: %v, want %s", ask[i].Name, o.Err, kinds[i])
		}
	}
	_, err = r.UserByName(ctx, "cleo")
	r.kind(err, fleet.KindNotFound)
	outcomes, err = r.AddUsers(ctx, ask, true, r.now)
	r.ok(err)
	if u := outcomes[0].User; outcomes[0].Err != nil || u.Login != "cleo" || u.UID != fleet.FirstAutoUID+2 || u.GID != u.UID || u.Project != "default" || u.Role != fleet.RoleMember {
		t.Errorf("cleo %+v, %v", u, outcomes[0].Err)
	}
	users, next, err := r.Users(ctx, 2, "")
	r.ok(err)
	rest, end, err := r.Users(ctx, 2, next)
	r.ok(err)
	if len(users) != 2 || next != "bo" || len(rest) != 1 || rest[0].Name != "cleo" || end != "" {
		t.Errorf("pages %v %q %v %q", users, next, rest, end)
	}
}

// A gid of the system would be a way to the files of host groups on shared volumes, as a uid of it is.
func TestIdsOfTheSystemAreRefused(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	for _, u := range []fleet.User{{Name: "cleo", GID: 999}, {Name: "cleo", GID: 1}, {Name: "cleo", GID: -1}, {Name: "cleo", UID: 999}} {
		outcomes, err := r.AddUsers(ctx, []fleet.User{u}, false, r.now)
		r.ok(err)
		if err := outcomes[0].Err; !fleet.IsKind(err, fleet.KindInvalid) || !strings.Contains(err.Error(), "use 1000 or more") {
			t.Errorf("uid %d, gid %d: %v", u.UID, u.GID, err)
		}
	}
	_, err := r.UpdateUser(ctx, "ana", func(u *fleet.User) error { u.GID = 27; return nil }, r.now)
	r.kind(err, fleet.KindInvalid)
	outcomes, err := r.AddUsers(ctx, []fleet.User{{Name: "cleo", GID: 1000}}, false, r.now)
	r.ok(err)
	r.ok(outcomes[0].Err)
}

func TestLastAdminStays_T42(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	admin, created, err := r.FirstAdmin(ctx, "root-of-all", r.now)
	r.ok(err)
	again, createdAgain, err := r.FirstAdmin(ctx, "another", r.now)
	r.ok(err)
	if !created || createdAgain || again.ID != admin.ID {
		t.Fatalf("%v %+v, then %v %+v", created, admin, createdAgain, again)
	}
	for name, change := range map[string]func(*fleet.User) error{
		"role":    func(u *fleet.User) error { u.Role = fleet.RoleMember; return nil },
		"disable": func(u *fleet.User) error { u.Disabled = true; return nil },
		"delete":  func(u *fleet.User) error { u.DeletedAt = r.now; return nil },
	} {
		if _, err := r.UpdateUser(ctx, admin.Name, change, r.now); !fleet.IsKind(err, fleet.KindConflict) {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err = r.UpdateUser(ctx, "ana", func(u *fleet.User) error { u.Role = fleet.RoleAdmin; return nil }, r.now)
	r.ok(err)
	_, err = r.UpdateUser(ctx, admin.Name, func(u *fleet.User) error { u.Disabled = true; return nil }, r.now)
	r.ok(err)
	_, err = r.UpdateUser(ctx, "bo", func(u *fleet.User) error { u.UID = r.ana.UID; return nil }, r.now)
	r.kind(err, fleet.KindExists)
}

func TestTokensEndByRevocationExpiryAndDisabling(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	token, err := r.AddToken(ctx, fleet.Token{User: r.ana.ID, Label: "laptop", CreatedAt: r.now, ExpiresAt: r.now.Add(time.Hour)}, hash("one"))
	r.ok(err)
	got, u, err := r.TokenByHash(ctx, hash("one"), r.now)
	r.ok(err)
	if got.ID != token.ID || got.UserName != "ana" || u.ID != r.ana.ID {
		t.Errorf("%+v %+v", got, u)
	}
	r.ok(r.TouchToken(ctx, token.ID, r.now))
	_, _, err = r.TokenByHash(ctx, hash("two"), r.now)
	r.kind(err, fleet.KindUnauthenticated)
	_, _, err = r.TokenByHash(ctx, hash("one"), r.now.Add(time.Hour))
	r.kind(err, fleet.KindUnauthenticated)
	r.kind(r.RevokeToken(ctx, token.ID, r.bo.ID, r.now), fleet.KindNotFound)
	_, err = r.UpdateUser(ctx, "ana", func(u *fleet.User) error { u.Disabled = true; return nil }, r.now)
	r.ok(err)
	_, _, err = r.TokenByHash(ctx, hash("one"), r.now)
	r.kind(err, fleet.KindUnauthenticated)
	_, err = r.UpdateUser(ctx, "ana", func(u *fleet.User) error { u.Disabled = false; return nil }, r.now)
	r.ok(err)
	r.ok(r.RevokeToken(ctx, token.ID, r.ana.ID, r.now))
	r.ok(r.RevokeToken(ctx, token.ID, "", r.now))
	_, _, err = r.TokenByHash(ctx, hash("one"), r.now)
	r.kind(err, fleet.KindUnauthenticated)
	if list, err := r.Tokens(ctx, r.ana.ID); err != nil || len(list) != 0 {
		t.Errorf("tokens %v %v", list, err)
	}
}

func TestSignInWorksOnce(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	r.ok(r.AddSignIn(ctx, r.ana.ID, hash("a"), r.now.Add(time.Hour), r.now))
	r.ok(r.AddSignIn(ctx, r.ana.ID, hash("b"), r.now.Add(-time.Second), r.now))
	var used atomic.Int32
	var group sync.WaitGroup
	for range 16 {
		group.Go(func() {
			if u, err := r.UseSignIn(ctx, hash("a"), r.now); err == nil && u.ID == r.ana.ID {
				used.Add(1)
			}
		})
	}
	group.Wait()
	if used.Load() != 1 {
		t.Errorf("one sign-in worked %d times", used.Load())
	}
	for _, code := range []string{"a", "b", "c"} {
		_, err := r.UseSignIn(ctx, hash(code), r.now)
		r.kind(err, fleet.KindUnauthenticated)
	}
}

func TestDeviceKeyBelongsToOneUser(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	w := r.create(r.ana, "w1", 0)
	r.place(w, r.h1.ID)
	before, err := r.Desired(ctx, r.h1.ID)
	r.ok(err)
	key := fleet.DeviceKey{User: r.ana.ID, PublicKey: "ssh-ed25519 AAAA", Fingerprint: "SHA256:x", Label: "laptop", CreatedAt: r.now}
	made, err := r.AddDeviceKey(ctx, key)
	r.ok(err)
	again, err := r.AddDeviceKey(ctx, key)
	r.ok(err)
	if again != made || made.ID == "" {
		t.Errorf("%+v, again %+v", made, again)
	}
	d, err := r.Desired(ctx, r.h1.ID)
	r.ok(err)
	hosts, err := r.HostsOfUser(ctx, r.ana.ID)
	r.ok(err)
	if d.Stamp.Generation <= before.Stamp.Generation || len(d.Runs[0].Keys) != 1 || len(hosts) != 1 {
		t.Errorf("hosts %v, desired %+v", hosts, d)
	}
	key.User = r.bo.ID
	_, err = r.AddDeviceKey(ctx, key)
	r.kind(err, fleet.KindExists)
	_, err = r.RevokeDeviceKey(ctx, "SHA256:x", r.bo.ID, r.now)
	r.kind(err, fleet.KindNotFound)
	_, err = r.RevokeDeviceKey(ctx, "SHA256:x", r.ana.ID, r.now)
	r.ok(err)
	if d, err = r.Desired(ctx, r.h1.ID); err != nil || len(d.Runs[0].Keys) != 0 {
		t.Errorf("a revoked key is still sent: %+v %v", d.Runs[0].Keys, err)
	}
	_, err = r.AddDeviceKey(ctx, key) // free for another now
	r.ok(err)
}

func TestJoinTokenLetsOneHostIn(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	r.ok(r.AddJoinToken(ctx, sqlite.JoinToken{Hash: hash("j"), ExpiresAt: r.now.Add(time.Hour)}))
	r.ok(r.AddJoinToken(ctx, sqlite.JoinToken{Hash: hash("named"), Host: "h7", ExpiresAt: r.now.Add(time.Hour)}))
	r.kind(r.AddJoinToken(ctx, sqlite.JoinToken{Hash: hash("p"), Pool: "none"}), fleet.KindNotFound)
	var joined atomic.Int32
	var group sync.WaitGroup
	for i := range 64 {
		group.Go(func() {
			if _, err := r.JoinHost(ctx, hash("j"), fmt.Sprintf("j%d", i), make([]byte, 32), "v1", r.now); err == nil {
				joined.Add(1)
			}
		})
	}
	group.Wait()
	hosts, err := r.Hosts(ctx)
	r.ok(err)
	if joined.Load() != 1 || len(hosts) != 3 {
		t.Errorf("%d joined, %d hosts", joined.Load(), len(hosts))
	}
	for _, c := range []struct {
		secret, name string
		key          int
		kind         fleet.Kind
	}{
		{"named", "h8", 32, fleet.KindUnauthenticated}, {"nothing", "h8", 32, fleet.KindUnauthenticated}, {"named", "h7", 31, fleet.KindInvalid},
	} {
		_, err := r.JoinHost(ctx, hash(c.secret), c.name, make([]byte, c.key), "v1", r.now)
		r.kind(err, c.kind)
	}
	r.ok(r.AddJoinToken(ctx, sqlite.JoinToken{Hash: hash("again"), Host: "h1", ExpiresAt: r.now.Add(time.Hour)}))
	key := append(make([]byte, 31), 7)
	again, err := r.JoinHost(ctx, hash("again"), "h1", key, "v2", r.now)
	r.ok(err)
	if again.ID != r.h1.ID || again.PublicKey[31] != 7 {
		t.Errorf("joined again as %+v", again)
	}
	_, err = r.JoinHost(ctx, hash("named"), "h7", make([]byte, 32), "v1", r.now.Add(2*time.Hour))
	r.kind(err, fleet.KindUnauthenticated)
	r.ok(r.Seen(ctx, r.h1.ID, r.now.Add(2*time.Hour)))
	_, err = r.JoinHost(ctx, hash("named"), "h7", make([]byte, 32), "v1", r.now)
	r.kind(err, fleet.KindUnauthenticated) // time does not go back
}

func TestPoolsAndImages(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	r.ok(r.CreatePool(ctx, fleet.Pool{Name: "big", Default: true}))
	r.kind(r.CreatePool(ctx, fleet.Pool{Name: "big"}), fleet.KindExists)
	r.kind(r.CreatePool(ctx, fleet.Pool{Name: "Big"}), fleet.KindInvalid)
	p, err := r.Pool(ctx, "")
	r.ok(err)
	if p.Name != "big" {
		t.Errorf("default pool %+v", p)
	}
	_, err = r.UpdatePool(ctx, "big", func(p *fleet.Pool) error { p.Default = false; return nil })
	r.kind(err, fleet.KindConflict)
	_, err = r.Pool(ctx, "none")
	r.kind(err, fleet.KindNotFound)
	image, err := r.PutImage(ctx, fleet.Image{Name: "base", Reference: "carrel/base:1", Digest: "sha256:ab"}, r.now)
	r.ok(err)
	_, err = r.PutImage(ctx, fleet.Image{Name: "cuda", Reference: "carrel/cuda:1", Default: true}, r.now)
	r.ok(err)
	images, err := r.Images(ctx)
	r.ok(err)
	if !image.Default || len(images) != 2 || images[0].Default || !images[1].Default {
		t.Errorf("images %+v", images)
	}
	r.create(r.ana, "w1", 0)
	used, err := r.RemoveImage(ctx, "base")
	r.ok(err)
	if used != 1 {
		t.Errorf("%d workspaces use it, want 1", used)
	}
	_, err = r.Image(ctx, "base")
	r.kind(err, fleet.KindNotFound)
	_, err = r.PutImage(ctx, fleet.Image{Name: strings.Repeat("x", 300), Reference: "y"}, r.now)
	r.kind(err, fleet.KindInvalid)
	r.ok(r.CreateProject(ctx, fleet.Project{Name: "vision", Members: []string{"bo"}}, r.now))
	projects, err := r.Projects(ctx)
	r.ok(err)
	if len(projects) != 2 || len(projects[0].Members) != 2 || projects[1].Members[0] != "bo" {
		t.Errorf("projects %+v", projects)
	}
	r.ok(r.AddAudit(ctx, sqlite.Audit{At: r.now, Actor: "ana", Verb: "stop", Subject: "ana/w1"}))
	if rows, err := r.Audits(ctx, 10); err != nil || len(rows) != 1 || rows[0].Verb != "stop" {
		t.Errorf("audit %+v %v", rows, err)
	}
}
