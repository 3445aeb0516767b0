package gateway_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/crypto/ssh"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
)

func deviceKey(t *testing.T) string {
	t.Helper()
	public, _, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	key, err := ssh.NewPublicKey(public)
	if err != nil {
		t.Fatal(err)
	}
	return string(ssh.MarshalAuthorizedKey(key))
}

// T-9: a member reaches no object of another, by whatever name; what is denied changes nothing.
func TestMembersReachNothingOfAnother(t *testing.T) {
	r := start(t, "images.allow=any", "scheduler.tick=1h")
	r.join("h1")
	ana, bob := r.user("ana"), r.user("bob")
	demo := r.create(ana, "demo", false)
	idle := r.create(ana, "idle", true)
	key, err := r.auth().AddDeviceKey(t.Context(), with(ana, &carrelv1.AddDeviceKeyRequest{PublicKey: deviceKey(t)}))
	if err != nil {
		t.Fatal(err)
	}
	me, err := r.auth().WhoAmI(t.Context(), with(ana, &carrelv1.WhoAmIRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	volumes := carrelv1connect.NewVolumeServiceClient(r.http, r.url)
	homes, err := volumes.List(t.Context(), with(ana, &carrelv1.VolumeServiceListRequest{}))
	if err != nil || len(homes.Msg.GetVolumes()) == 0 {
		t.Fatalf("ana's volumes: %v, %v", homes, err)
	}
	if _, err := r.auth().WhoAmI(t.Context(), with(bob, &carrelv1.WhoAmIRequest{})); err != nil {
		t.Fatal(err)
	}
	quiet := func() string { return fingerprint(t, r.state) }

	refs := []string{demo.GetId(), "demo", "ana/demo", "ana/" + demo.GetId(), idle.GetId(), "bob/" + demo.GetId(), demo.GetId()[:6]}
	tries := append(tryWorkspaces(r, bob, refs), tryLists(r, bob)...)
	for _, tr := range tries {
		before := quiet()
		err := tr.call(t.Context())
		if code := connect.CodeOf(err); err == nil || (code != connect.CodeNotFound && code != connect.CodePermissionDenied) {
			t.Errorf("%s: %v", tr.what, err)
		}
		if quiet() != before {
			t.Errorf("%s: the database changed", tr.what)
		}
	}

	// These ask the writer, which notes the time; what they would have changed is looked at instead.
	for what, call := range map[string]func() error{
		"revoke ana's token": func() error {
			_, err := r.auth().RevokeToken(t.Context(), with(bob, &carrelv1.RevokeTokenRequest{Id: me.Msg.GetToken().GetId()}))
			return err
		},
		"revoke ana's key by id": func() error {
			_, err := r.auth().RevokeDeviceKey(t.Context(), with(bob, &carrelv1.RevokeDeviceKeyRequest{Id: key.Msg.GetKey().GetId()}))
			return err
		},
		"revoke ana's key by fingerprint": func() error {
			_, err := r.auth().RevokeDeviceKey(t.Context(), with(bob, &carrelv1.RevokeDeviceKeyRequest{Id: key.Msg.GetKey().GetFingerprint()}))
			return err
		},
		"delete ana's volume": func() error {
			_, err := volumes.Delete(t.Context(), with(bob, &carrelv1.VolumeServiceDeleteRequest{Volume: homes.Msg.GetVolumes()[0].GetId()}))
			return err
		},
	} {
		if err := call(); connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := r.auth().AddDeviceKey(t.Context(), with(bob, &carrelv1.AddDeviceKeyRequest{PublicKey: key.Msg.GetKey().GetPublicKey()})); connect.CodeOf(err) != connect.CodeAlreadyExists {
		t.Errorf("ana's key registered by bob: %v", err)
	}
	keys, err := r.auth().ListDeviceKeys(t.Context(), with(ana, &carrelv1.ListDeviceKeysRequest{}))
	if err != nil || len(keys.Msg.GetKeys()) != 1 {
		t.Errorf("ana's keys are now %v, %v", keys, err)
	}
	if r.run(ana, "demo") != 1 {
		t.Error("ana's workspace does not run any more as it did")
	}
	list, err := r.workspaces().List(t.Context(), with(bob, &carrelv1.ListRequest{}))
	if err != nil || len(list.Msg.GetWorkspaces()) != 0 {
		t.Errorf("bob lists %v, %v", list, err)
	}
	users, err := r.users().List(t.Context(), with(bob, &carrelv1.UserServiceListRequest{}))
	if err != nil || len(users.Msg.GetUsers()) != 1 {
		t.Errorf("bob sees the accounts %v, %v", users, err)
	}

	// An admin stops and looks, but attaches to nobody else's (DESIGN, section 6).
	if _, err := r.ticket(r.admin, "ana/demo"); connect.CodeOf(err) != connect.CodePermissionDenied {
		t.Errorf("the admin's ticket: %v", err)
	}
	if _, err := r.ticket(r.admin, demo.GetId()); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("the admin's ticket by id: %v", err)
	}
	if _, err := r.workspaces().Get(t.Context(), with(r.admin, &carrelv1.GetRequest{Workspace: "ana/demo"})); err != nil {
		t.Errorf("the admin looks at ana/demo: %v", err)
	}
}

// firstOf reads a stream's first message and returns why there is none.
func firstOf[T any](stream *connect.ServerStreamForClient[T], err error) error {
	if err != nil {
		return err
	}
	stream.Receive()
	err = stream.Err()
	_ = stream.Close() // what follows the first message does not matter
	return err
}

// AUTH-13: bad names of a batch are rejected one by one, each with a reason; the good ones exist, under one form.
// AUTH-12: disabling an account ends its sign-ins and streams; its workspaces go on, and an admin can stop and remove each by OWNER/NAME.
func TestWorkspacesOfADisabledUserAreTheAdminsToEnd_AUTH12(t *testing.T) {
	r := start(t, "images.allow=any")
	r.join("h1")
	ana := r.user("ana")
	r.create(ana, "demo", false)
	r.create(ana, "idle", true)
	r.disable("ana", true)
	state := func(want carrelv1.WorkspaceState) {
		t.Helper()
		until(t, "ana/demo is "+want.String(), func() bool {
			res, err := r.workspaces().Get(t.Context(), with(r.admin, &carrelv1.GetRequest{Workspace: "ana/demo"}))
			if err != nil {
				t.Fatal(err)
			}
			return res.Msg.GetWorkspace().GetState() == want
		})
	}
	state(carrelv1.WorkspaceState_WORKSPACE_STATE_RUNNING)
	list, err := r.workspaces().List(t.Context(), with(r.admin, &carrelv1.ListRequest{AllUsers: true}))
	if err != nil || len(list.Msg.GetWorkspaces()) != 2 {
		t.Errorf("the admin sees %v, %v", list, err)
	}
	if _, err := r.workspaces().Stop(t.Context(), with(r.admin, &carrelv1.StopRequest{Workspace: "ana/demo"})); err != nil {
		t.Fatal(err)
	}
	state(carrelv1.WorkspaceState_WORKSPACE_STATE_STOPPED)
	for _, name := range []string{"ana/demo", "ana/idle"} {
		res, err := r.workspaces().Delete(t.Context(), with(r.admin, &carrelv1.DeleteRequest{Workspace: name}))
		if err != nil || len(res.Msg.GetKeptVolumes()) != 1 {
			t.Errorf("remove %s: %v, %v", name, res, err)
		}
	}
	r.disable("ana", false) // and what she had is still hers
	homes, err := carrelv1connect.NewVolumeServiceClient(r.http, r.url).List(t.Context(), with(ana, &carrelv1.VolumeServiceListRequest{}))
	if err != nil || len(homes.Msg.GetVolumes()) != 2 {
		t.Errorf("her volumes: %v, %v", homes, err)
	}
}

func TestBadNamesOfABatchAreRejectedOneByOne(t *testing.T) {
	r := start(t)
	bad := []string{" ana", "Ana", "ANA@EXAMPLE.ORG", "a/b", "a%2Fb", "..", "-ana", "ana\nroot:x", "", strings.Repeat("a", 300), "a--b", ".ana", "ana-", "1ana", "анна", "ana\x00"}
	good := []string{"ana", "bob-2", strings.Repeat("c", 22)}
	var batch []*carrelv1.User
	for i, name := range bad {
		batch = append(batch, &carrelv1.User{Name: name})
		if i < len(good) {
			batch = append(batch, &carrelv1.User{Name: good[i]})
		}
	}
	res, err := r.users().Add(t.Context(), with(r.admin, &carrelv1.UserServiceAddRequest{Users: batch, Partial: true}))
	if err != nil {
		t.Fatal(err)
	}
	made := map[string]bool{}
	for i, added := range res.Msg.GetUsers() {
		switch {
		case added.GetError() == "":
			made[added.GetUser().GetName()] = true
		case len(added.GetError()) > 400 || strings.ContainsAny(added.GetError(), "\n\x00"):
			t.Errorf("the reason for %.20q is not one short line: %q", batch[i].GetName(), added.GetError())
		}
	}
	for _, name := range good {
		if !made[name] {
			t.Errorf("%s was not made", name)
		}
	}
	if len(made) != len(good) {
		t.Errorf("made %v", made)
	}
	for _, other := range []string{"ANA", "Ana", " ana"} {
		_, err := r.users().Update(t.Context(), with(r.admin, &carrelv1.UserServiceUpdateRequest{User: &carrelv1.User{Name: other, Disabled: true}, Fields: []string{"disabled"}}))
		if connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("disable %q: %v; an account is named in one way", other, err)
		}
	}
}

// try is a call that must be denied and change nothing.
type try struct {
	what string
	call func(ctx context.Context) error
}

// tryWorkspaces are bob's calls about workspaces that are not his.
func tryWorkspaces(r *rig, bob string, refs []string) []try {
	var tries []try
	add := func(what string, call func(ctx context.Context) error) { tries = append(tries, try{what, call}) }
	for _, ref := range refs {
		add("get "+ref, func(ctx context.Context) error {
			_, err := r.workspaces().Get(ctx, with(bob, &carrelv1.GetRequest{Workspace: ref}))
			return err
		})
		add("update "+ref, func(ctx context.Context) error {
			_, err := r.workspaces().Update(ctx, with(bob, &carrelv1.UpdateRequest{Workspace: ref, Fields: []string{"memory_mib"}, Spec: &carrelv1.WorkspaceSpec{MemoryMib: 99}}))
			return err
		})
		add("start "+ref, func(ctx context.Context) error {
			_, err := r.workspaces().Start(ctx, with(bob, &carrelv1.StartRequest{Workspace: ref}))
			return err
		})
		add("stop "+ref, func(ctx context.Context) error {
			_, err := r.workspaces().Stop(ctx, with(bob, &carrelv1.StopRequest{Workspace: ref}))
			return err
		})
		add("restart "+ref, func(ctx context.Context) error {
			_, err := r.workspaces().Restart(ctx, with(bob, &carrelv1.RestartRequest{Workspace: ref}))
			return err
		})
		add("delete "+ref, func(ctx context.Context) error {
			_, err := r.workspaces().Delete(ctx, with(bob, &carrelv1.DeleteRequest{Workspace: ref, DeleteHome: true}))
			return err
		})
		add("watch "+ref, func(ctx context.Context) error {
			return firstOf(r.workspaces().Watch(ctx, with(bob, &carrelv1.WatchRequest{Workspace: ref})))
		})
		add("logs "+ref, func(ctx context.Context) error {
			return firstOf(r.workspaces().Logs(ctx, with(bob, &carrelv1.LogsRequest{Workspace: ref})))
		})
		add("ticket "+ref, func(context.Context) error {
			_, err := r.ticket(bob, ref)
			return err
		})
		add("usage of "+ref, func(ctx context.Context) error {
			_, err := carrelv1connect.NewUsageServiceClient(r.http, r.url).Report(ctx, with(bob, &carrelv1.ReportRequest{By: carrelv1.UsageGroup_USAGE_GROUP_LEASE, Workspace: ref}))
			return err
		})
	}
	return tries
}

// tryLists are bob's calls about everybody or ana.
func tryLists(r *rig, bob string) []try {
	var tries []try
	add := func(what string, call func(ctx context.Context) error) { tries = append(tries, try{what, call}) }
	add("list all", func(ctx context.Context) error {
		_, err := r.workspaces().List(ctx, with(bob, &carrelv1.ListRequest{AllUsers: true}))
		return err
	})
	add("watch all", func(ctx context.Context) error {
		return firstOf(r.workspaces().Watch(ctx, with(bob, &carrelv1.WatchRequest{AllUsers: true})))
	})
	add("usage of ana", func(ctx context.Context) error {
		_, err := carrelv1connect.NewUsageServiceClient(r.http, r.url).Report(ctx, with(bob, &carrelv1.ReportRequest{By: carrelv1.UsageGroup_USAGE_GROUP_USER, User: "ana"}))
		return err
	})
	add("all volumes", func(ctx context.Context) error {
		_, err := carrelv1connect.NewVolumeServiceClient(r.http, r.url).List(ctx, with(bob, &carrelv1.VolumeServiceListRequest{AllUsers: true}))
		return err
	})
	add("tokens of ana", func(ctx context.Context) error {
		_, err := r.auth().ListTokens(ctx, with(bob, &carrelv1.ListTokensRequest{User: "ana"}))
		return err
	})
	add("keys of ana", func(ctx context.Context) error {
		_, err := r.auth().ListDeviceKeys(ctx, with(bob, &carrelv1.ListDeviceKeysRequest{User: "ana"}))
		return err
	})
	return tries
}
