package gateway_test

import (
	"context"
	"crypto/ed25519"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
	"github.com/carrel-dev/carrel/proto/stream"
	"github.com/carrel-dev/carrel/services/auth"
)

// refused checks a refusal before the 101: its status, and what its one line of text must hold.
func refused(t *testing.T, what string, err error, status int, words ...string) {
	t.Helper()
	var se *stream.StatusError
	if !errors.As(err, &se) {
		t.Errorf("%s: %v, want a refusal", what, err)
		return
	}
	if se.Code != status {
		t.Errorf("%s: status %d (%s), want %d", what, se.Code, se.Body, status)
	}
	if text := strings.TrimSpace(se.Body); strings.Contains(text, "\n") || text == "" {
		t.Errorf("%s: want one line, got %q", what, se.Body)
	}
	for _, word := range words {
		if !strings.Contains(se.Body, word) {
			t.Errorf("%s: %q does not say %q", what, se.Body, word)
		}
	}
}

func (h *fakeHost) challenge() []byte {
	h.t.Helper()
	res, err := carrelv1connect.NewHostServiceClient(h.r.http, h.r.url).Challenge(h.t.Context(), connect.NewRequest(&carrelv1.ChallengeRequest{HostId: h.id}))
	if err != nil {
		h.t.Fatal(err)
	}
	return res.Msg.GetNonce()
}

func TestLinkDoorTakesOnlyAFreshProofOfTheHostItself(t *testing.T) {
	r := start(t)
	h, other := r.joined("h1"), r.joined("h2")
	now := time.Now().UnixNano()
	link := func(what string, header http.Header, status int, words ...string) {
		t.Helper()
		conn, _, err := h.dial("/carrel/link", header)
		if err == nil {
			_ = conn.Close()
		}
		refused(t, what, err, status, words...)
	}
	nonce := h.challenge()
	link("no headers", http.Header{}, http.StatusUnauthorized, "carreld agent --join")
	link("wrong key", h.headers(h.id, nonce, ed25519.Sign(other.key, auth.Proof(h.id, nonce)), now), http.StatusUnauthorized)
	link("right key, nonce spent on the wrong one", h.headers(h.id, nonce, ed25519.Sign(h.key, auth.Proof(h.id, nonce)), now), http.StatusUnauthorized)
	nonce = h.challenge()
	link("another host's nonce", h.headers(other.id, nonce, ed25519.Sign(other.key, auth.Proof(other.id, nonce)), now), http.StatusUnauthorized)
	nonce = h.challenge()
	link("signature without the label", h.headers(h.id, nonce, ed25519.Sign(h.key, nonce), now), http.StatusUnauthorized)
	nonce = h.challenge()
	link("name for an id", h.headers("h1", nonce, ed25519.Sign(h.key, auth.Proof("h1", nonce)), now), http.StatusUnauthorized)
	link("unknown host", h.headers("nosuchhost", nonce, ed25519.Sign(h.key, auth.Proof("nosuchhost", nonce)), now), http.StatusUnauthorized)
	made := make([]byte, 32)
	link("nonce of its own making", h.headers(h.id, made, ed25519.Sign(h.key, auth.Proof(h.id, made)), now), http.StatusUnauthorized)
	noInstance := h.proof(now)
	noInstance.Del("Carrel-Instance")
	link("no instance", noInstance, http.StatusBadRequest, "Carrel-Instance")

	good := h.proof(now)
	conn, _, err := h.dial("/carrel/link", good)
	if err != nil {
		t.Fatalf("a good proof: %v", err)
	}
	link("replayed proof", good, http.StatusUnauthorized)
	_ = conn.Close()

	if got := r.get("/carrel/link"); got.code < 400 || got.code >= 500 {
		t.Errorf("link without an upgrade: %d %s", got.code, got.body)
	}
}

func TestOlderAgentOfAnIdentityIsTurnedAwayWhileTheNewerIsConnected(t *testing.T) {
	r := start(t)
	h := r.joined("h1")
	ended := h.connect(2000)
	conn, _, err := h.dial("/carrel/link", h.proof(1000))
	if err == nil {
		_ = conn.Close()
	}
	refused(t, "older agent", err, http.StatusConflict, "h1", "end one of the two")
	second := h.connect(2001) // a newer one takes the place
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("the first link did not end")
	}

	// A host whose clock was set back starts an agent that looks older than the one that has ended: it must get in.
	conn, _, err = h.dial("/carrel/link", h.proof(3000))
	if err != nil {
		t.Fatal(err)
	}
	<-second
	_ = conn.Close()
	until(t, "an agent with an earlier start time gets in once the other has gone", func() bool {
		conn, _, err := h.dial("/carrel/link", h.proof(1500))
		if err != nil {
			return false
		}
		_ = conn.Close()
		return true
	})
}

func TestStreamDoorWantsTheTokenOfTheSession(t *testing.T) {
	r := start(t)
	h, other := r.joined("h1"), r.joined("h2")
	h.connect(1)
	first := h.token
	other.connect(1)
	for what, header := range map[string]http.Header{
		"no token":         {"Carrel-Host": {h.id}},
		"wrong token":      {"Carrel-Host": {h.id}, "Carrel-Stream-Token": {auth.NewCode().Text}},
		"other's token":    {"Carrel-Host": {h.id}, "Carrel-Stream-Token": {other.token}},
		"unknown host":     {"Carrel-Host": {"nosuch"}, "Carrel-Stream-Token": {first}},
		"token as a proof": {"Carrel-Host": {h.id}, "Carrel-Proof": {first}},
	} {
		conn, _, err := h.dial("/carrel/stream", header)
		if err == nil {
			_ = conn.Close()
		}
		refused(t, what, err, http.StatusUnauthorized, "session")
	}
	h.connect(2)
	conn, _, err := h.dial("/carrel/stream", http.Header{"Carrel-Host": {h.id}, "Carrel-Stream-Token": {first}})
	if err == nil {
		_ = conn.Close()
	}
	refused(t, "token of the session before", err, http.StatusUnauthorized)
}

func (r *rig) ticket(token, workspace string) (string, error) {
	res, err := carrelv1connect.NewAttachServiceClient(r.http, r.url).CreateTicket(r.t.Context(), with(token, &carrelv1.CreateTicketRequest{
		Workspace: workspace, Kind: carrelv1.StreamKind_STREAM_KIND_SSH,
	}))
	if err != nil {
		return "", err
	}
	return res.Msg.GetTicket(), nil
}

func (r *rig) mustTicket(token, workspace string) string {
	r.t.Helper()
	text, err := r.ticket(token, workspace)
	if err != nil {
		r.t.Fatalf("ticket for %s: %v", workspace, err)
	}
	return text
}

func (r *rig) attach(ticket string) (net.Conn, error) {
	conn, _, err := dial(r.t.Context(), r, "/carrel/attach", http.Header{"Carrel-Ticket": {ticket}})
	return conn, err
}

// echo sends a line through and reads it back.
func echo(t *testing.T, conn net.Conn) {
	t.Helper()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, "hello"); err != nil {
		t.Fatalf("write: %v", err)
	}
	got := make([]byte, 5)
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != "hello" {
		t.Fatalf("read %q, %v", got, err)
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) refusedTicket(what, ticket string, status int, words ...string) {
	r.t.Helper()
	conn, err := r.attach(ticket)
	if err == nil {
		_ = conn.Close()
	}
	refused(r.t, what, err, status, words...)
}

func TestAttachDoor(t *testing.T) {
	r := start(t, "images.allow=any")
	h := r.join("h1")
	ana := r.user("ana")
	demo := r.create(ana, "demo", false)

	ticket := r.mustTicket(ana, "demo")
	conn, err := r.attach(ticket)
	if err != nil {
		t.Fatalf("attach: %v", err)
	}
	echo(t, conn)
	if hello := <-h.opened; hello.Workspace != demo.GetId() || hello.Epoch != 1 || hello.Kind != "ssh" {
		t.Errorf("the host got %+v", hello)
	}
	r.refusedTicket("ticket used twice", ticket, http.StatusUnauthorized, "used up or too old")
	r.refusedTicket("no ticket", "", http.StatusUnauthorized)
	r.refusedTicket("made-up ticket", auth.NewCode().Text, http.StatusUnauthorized)
	r.refusedTicket("a token for a ticket", ana, http.StatusUnauthorized)
	if got := r.get("/carrel/attach", "Carrel-Ticket", r.mustTicket(ana, "demo")); got.code != http.StatusBadRequest || !strings.Contains(got.body, "Upgrade: carrel") {
		t.Errorf("attach without an upgrade: %d %s", got.code, got.body)
	}

	held := r.mustTicket(ana, "demo")
	if _, err := r.workspaces().Stop(t.Context(), with(ana, &carrelv1.StopRequest{Workspace: "demo"})); err != nil {
		t.Fatal(err)
	}
	r.await(ana, "demo", carrelv1.WorkspaceState_WORKSPACE_STATE_STOPPED)
	r.refusedTicket("workspace stopped after the ticket", held, http.StatusConflict, "demo", "stopped")
	_, err = r.ticket(ana, "demo")
	if connect.CodeOf(err) != connect.CodeFailedPrecondition || !strings.Contains(err.Error(), "carrel start demo") {
		t.Errorf("ticket for a stopped workspace: %v", err)
	}
	if _, err := r.workspaces().Start(t.Context(), with(ana, &carrelv1.StartRequest{Workspace: "demo"})); err != nil {
		t.Fatal(err)
	}
	r.await(ana, "demo", carrelv1.WorkspaceState_WORKSPACE_STATE_RUNNING)
	stale := r.mustTicket(ana, "demo")
	if _, err := r.workspaces().Restart(t.Context(), with(ana, &carrelv1.RestartRequest{Workspace: "demo"})); err != nil {
		t.Fatal(err)
	}
	until(t, "the next run is ready", func() bool { return r.run(ana, "demo") == 3 })
	r.refusedTicket("ticket for the run before", stale, http.StatusConflict)
}

// run returns the epoch of a workspace that is running, else 0.
func (r *rig) run(token, name string) int64 {
	res, err := r.workspaces().Get(r.t.Context(), with(token, &carrelv1.GetRequest{Workspace: name}))
	if err != nil {
		r.t.Fatal(err)
	}
	if w := res.Msg.GetWorkspace(); w.GetState() == carrelv1.WorkspaceState_WORKSPACE_STATE_RUNNING {
		return w.GetRun().GetEpoch()
	}
	return 0
}

// cut waits for the end of a stream; a revocation must be felt within 5 s (I16).
func cut(t *testing.T, what string, conn net.Conn) {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	_, err := conn.Read(make([]byte, 1))
	var timeout net.Error
	if err == nil || (errors.As(err, &timeout) && timeout.Timeout()) {
		t.Errorf("%s: the stream is still open after 5 s: %v", what, err)
	}
}

// T-8, A11, AUTH-05: what a disabled account or a revoked token holds open is cut within 5 s, what it holds ready opens nothing; another
// token of the same user goes on.
func TestRevokedMeansCut(t *testing.T) {
	r := start(t, "images.allow=any")
	r.join("h1")
	laptop := r.user("ana")
	desk := r.again("ana")
	r.create(laptop, "demo", false)

	open := func(token string) (net.Conn, func() error) {
		conn, err := r.attach(r.mustTicket(token, "demo"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		echo(t, conn)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		t.Cleanup(cancel)
		watch, err := r.workspaces().Watch(ctx, with(token, &carrelv1.WatchRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		for watch.Receive() && watch.Msg().GetWorkspace() != nil { // up to the end of the first picture
			continue
		}
		return conn, func() error {
			began := time.Now()
			for watch.Receive() {
				continue
			}
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("the Watch stream lived on for %s", took)
			}
			return watch.Err()
		}
	}
	laptopConn, laptopWatch := open(laptop)
	deskConn, deskWatch := open(desk)
	held := r.mustTicket(laptop, "demo")

	r.revoke(laptop)
	cut(t, "revoked token", laptopConn)
	if err := laptopWatch(); connect.CodeOf(err) != connect.CodeUnauthenticated || !strings.Contains(err.Error(), "revoked") {
		t.Errorf("Watch of a revoked token ended with %v", err)
	}
	r.refusedTicket("ticket of a token that was revoked since", held, http.StatusUnauthorized, "carrel login")
	echo(t, deskConn)
	if _, err := r.auth().WhoAmI(t.Context(), with(laptop, &carrelv1.WhoAmIRequest{})); connect.CodeOf(err) != connect.CodeUnauthenticated || !strings.Contains(err.Error(), "carrel login") {
		t.Errorf("a revoked token: %v", err) // SSH-24's text
	}

	held = r.mustTicket(desk, "demo")
	r.disable("ana", true)
	cut(t, "disabled account", deskConn)
	if err := deskWatch(); connect.CodeOf(err) != connect.CodeUnauthenticated || !strings.Contains(err.Error(), "disabled") {
		t.Errorf("Watch of a disabled account ended with %v", err)
	}
	r.refusedTicket("ticket of an account that was disabled since", held, http.StatusUnauthorized, "disabled")
	r.disable("ana", false)
	if _, err := r.auth().WhoAmI(t.Context(), with(desk, &carrelv1.WhoAmIRequest{})); err != nil {
		t.Errorf("the account is enabled again: %v", err)
	}
}

// A demoted admin's streams must not go on showing everybody's workspaces.
func TestDemotionEndsStreamsThatShowedMore(t *testing.T) {
	r := start(t)
	second := r.user("second")
	role := func(role carrelv1.Role) {
		if _, err := r.users().Update(t.Context(), with(r.admin, &carrelv1.UserServiceUpdateRequest{User: &carrelv1.User{Name: "second", Role: role}, Fields: []string{"role"}})); err != nil {
			t.Fatal(err)
		}
	}
	role(carrelv1.Role_ROLE_ADMIN)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	watch, err := r.workspaces().Watch(ctx, with(second, &carrelv1.WatchRequest{AllUsers: true}))
	if err != nil || !watch.Receive() {
		t.Fatalf("watch: %v, %v", err, watch.Err())
	}
	role(carrelv1.Role_ROLE_MEMBER)
	for watch.Receive() {
		continue
	}
	if connect.CodeOf(watch.Err()) != connect.CodeUnavailable {
		t.Errorf("the stream ended with %v", watch.Err())
	}
	again, err := r.workspaces().Watch(ctx, with(second, &carrelv1.WatchRequest{AllUsers: true}))
	if err == nil {
		again.Receive()
		err = again.Err()
	}
	if connect.CodeOf(err) != connect.CodePermissionDenied {
		t.Errorf("a member watches all: %v", err)
	}
}

// AUTH-05: a token's last use is shown, and a revoked one stays refused after a restart of the gateway.
func TestTokensShowTheirLastUseAndStayRevokedOverARestart(t *testing.T) {
	r := start(t)
	first := r.user("ana")
	second := r.again("ana")
	res, err := r.auth().ListTokens(t.Context(), with(second, &carrelv1.ListTokensRequest{}))
	if err != nil || len(res.Msg.GetTokens()) != 2 {
		t.Fatalf("tokens: %v, %v", res, err)
	}
	res, err = r.auth().ListTokens(t.Context(), with(second, &carrelv1.ListTokensRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	for _, token := range res.Msg.GetTokens() {
		if token.GetCurrent() != (token.GetLastUsedAt() != nil) {
			t.Errorf("token %v: only the current one was used", token)
		}
	}
	r.revoke(first)
	if err := r.shut(); err != nil {
		t.Fatal(err)
	}
	again := startIn(t, r.state)
	if again.link != "" {
		t.Error("a second start made another first sign-in")
	}
	if _, err := again.auth().WhoAmI(t.Context(), with(first, &carrelv1.WhoAmIRequest{})); connect.CodeOf(err) != connect.CodeUnauthenticated {
		t.Errorf("revoked before the restart: %v", err)
	}
	if _, err := again.auth().WhoAmI(t.Context(), with(second, &carrelv1.WhoAmIRequest{})); err != nil {
		t.Errorf("the other token: %v", err)
	}
}
