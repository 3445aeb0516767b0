package rpc

import (
	"context"
	"strings"
	"time"

	"connectrpc.com/connect"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/fleet"
)

// longestLabel is the most characters of a token's or key's label.
const longestLabel = 64

// AuthStore keeps tokens, sign-ins and device keys.
type AuthStore interface {
	AddToken(ctx context.Context, token fleet.Token, hash []byte) (fleet.Token, error)
	Tokens(ctx context.Context, user fleet.UserID) ([]fleet.Token, error)
	RevokeToken(ctx context.Context, id string, user fleet.UserID, now time.Time) error
	UseSignIn(ctx context.Context, hash []byte, now time.Time) (fleet.User, error)
	UserByName(ctx context.Context, name string) (fleet.User, error)
	AddDeviceKey(ctx context.Context, key fleet.DeviceKey) (fleet.DeviceKey, error)
	DeviceKeys(ctx context.Context, user fleet.UserID) ([]fleet.DeviceKey, error)
	RevokeDeviceKey(ctx context.Context, idOrFingerprint string, user fleet.UserID, now time.Time) (fleet.DeviceKey, error)
}

// Streams closes what a revoked token still holds open.
type Streams interface {
	CloseToken(token, reason string)
	CloseUser(user, reason string)
}

// KeyWatcher is told when a user's device keys changed, so that running workspaces learn of it.
type KeyWatcher interface {
	KeysChanged(ctx context.Context, user fleet.UserID) error
}

// Auth serves AuthService.
type Auth struct {
	Store      AuthStore
	Streams    Streams
	Keys       KeyWatcher
	Now        func() time.Time
	TokenLife  time.Duration
	Version    string
	Deployment string
}

var _ carrelv1connect.AuthServiceHandler = (*Auth)(nil)

// oldestClient is the oldest CLI whose calls this gateway understands.
const oldestClient = "0.1.0"

// ServerInfo tells version and name of the deployment.
func (a *Auth) ServerInfo(context.Context, *connect.Request[carrelv1.ServerInfoRequest]) (*connect.Response[carrelv1.ServerInfoResponse], error) {
	return connect.NewResponse(&carrelv1.ServerInfoResponse{Version: a.Version, Deployment: a.Deployment, MinClientVersion: oldestClient}), nil
}

// SignIn turns a one-time sign-in into a token.
func (a *Auth) SignIn(ctx context.Context, req *connect.Request[carrelv1.SignInRequest]) (*connect.Response[carrelv1.SignInResponse], error) {
	label, err := checkLabel(req.Msg.GetLabel())
	if err != nil {
		return nil, err
	}
	now := a.Now()
	user, err := a.Store.UseSignIn(ctx, auth.Hash(req.Msg.GetCode()), now)
	if err != nil {
		return nil, err
	}
	secret := auth.NewToken()
	token, err := a.Store.AddToken(ctx, fleet.Token{User: user.ID, Label: label, CreatedAt: now, ExpiresAt: now.Add(a.TokenLife)}, secret.Hash)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.SignInResponse{Token: secret.Text, User: userOnWire(user), ExpiresAt: stamp(token.ExpiresAt)}), nil
}

// SignOut revokes the token of this call.
func (a *Auth) SignOut(ctx context.Context, _ *connect.Request[carrelv1.SignOutRequest]) (*connect.Response[carrelv1.SignOutResponse], error) {
	actor := actorOf(ctx)
	if err := a.revoke(ctx, actor.Token.ID, actor.User.ID); err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.SignOutResponse{}), nil
}

// WhoAmI returns the caller.
func (a *Auth) WhoAmI(ctx context.Context, _ *connect.Request[carrelv1.WhoAmIRequest]) (*connect.Response[carrelv1.WhoAmIResponse], error) {
	actor := actorOf(ctx)
	token := tokenOnWire(actor.Token, actor.User.Name)
	token.Current = true
	return connect.NewResponse(&carrelv1.WhoAmIResponse{User: userOnWire(actor.User), Token: token}), nil
}

// whose returns the user that a call is about: the caller, or another for an admin.
func (a *Auth) whose(ctx context.Context, name string) (fleet.User, error) {
	actor := actorOf(ctx)
	if name == "" || name == actor.User.Name {
		return actor.User, nil
	}
	if !actor.Admin() {
		return fleet.User{}, fleet.Errorf(fleet.KindForbidden, "only an admin may look at another user")
	}
	return a.Store.UserByName(ctx, name)
}

// ListTokens returns a user's tokens.
func (a *Auth) ListTokens(ctx context.Context, req *connect.Request[carrelv1.ListTokensRequest]) (*connect.Response[carrelv1.ListTokensResponse], error) {
	user, err := a.whose(ctx, req.Msg.GetUser())
	if err != nil {
		return nil, err
	}
	tokens, err := a.Store.Tokens(ctx, user.ID)
	if err != nil {
		return nil, err
	}
	res := &carrelv1.ListTokensResponse{}
	for _, t := range tokens {
		wire := tokenOnWire(t, user.Name)
		wire.Current = t.ID == actorOf(ctx).Token.ID
		res.Tokens = append(res.Tokens, wire)
	}
	return connect.NewResponse(res), nil
}

// RevokeToken ends a token and cuts its streams.
func (a *Auth) RevokeToken(ctx context.Context, req *connect.Request[carrelv1.RevokeTokenRequest]) (*connect.Response[carrelv1.RevokeTokenResponse], error) {
	actor := actorOf(ctx)
	owner := actor.User.ID
	if actor.Admin() {
		owner = "" // anybody's
	}
	if err := a.revoke(ctx, req.Msg.GetId(), owner); err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.RevokeTokenResponse{}), nil
}

func (a *Auth) revoke(ctx context.Context, id string, owner fleet.UserID) error {
	if err := a.Store.RevokeToken(ctx, id, owner, a.Now()); err != nil {
		return err
	}
	a.Streams.CloseToken(id, "this sign-in was revoked")
	return nil
}

// AddDeviceKey registers a key.
func (a *Auth) AddDeviceKey(ctx context.Context, req *connect.Request[carrelv1.AddDeviceKeyRequest]) (*connect.Response[carrelv1.AddDeviceKeyResponse], error) {
	label, err := checkLabel(req.Msg.GetLabel())
	if err != nil {
		return nil, err
	}
	authorized, fingerprint, err := auth.ParseDeviceKey(req.Msg.GetPublicKey())
	if err != nil {
		return nil, err
	}
	actor := actorOf(ctx)
	key, err := a.Store.AddDeviceKey(ctx, fleet.DeviceKey{User: actor.User.ID, PublicKey: authorized, Fingerprint: fingerprint, Label: label, CreatedAt: a.Now()})
	if err != nil {
		return nil, err
	}
	if err := a.Keys.KeysChanged(ctx, actor.User.ID); err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.AddDeviceKeyResponse{Key: keyOnWire(key, actor.User.Name)}), nil
}

// ListDeviceKeys returns a user's keys.
func (a *Auth) ListDeviceKeys(ctx context.Context, req *connect.Request[carrelv1.ListDeviceKeysRequest]) (*connect.Response[carrelv1.ListDeviceKeysResponse], error) {
	user, err := a.whose(ctx, req.Msg.GetUser())
	if err != nil {
		return nil, err
	}
	keys, err := a.Store.DeviceKeys(ctx, user.ID)
	if err != nil {
		return nil, err
	}
	res := &carrelv1.ListDeviceKeysResponse{}
	for _, k := range keys {
		res.Keys = append(res.Keys, keyOnWire(k, user.Name))
	}
	return connect.NewResponse(res), nil
}

// RevokeDeviceKey takes a key out everywhere.
func (a *Auth) RevokeDeviceKey(ctx context.Context, req *connect.Request[carrelv1.RevokeDeviceKeyRequest]) (*connect.Response[carrelv1.RevokeDeviceKeyResponse], error) {
	actor := actorOf(ctx)
	owner := actor.User.ID
	if actor.Admin() {
		owner = "" // anybody's
	}
	key, err := a.Store.RevokeDeviceKey(ctx, req.Msg.GetId(), owner, a.Now())
	if err != nil {
		return nil, err
	}
	if err := a.Keys.KeysChanged(ctx, key.User); err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.RevokeDeviceKeyResponse{}), nil
}

func checkLabel(label string) (string, error) {
	label = strings.TrimSpace(label)
	if len(label) > longestLabel {
		return "", fleet.Errorf(fleet.KindInvalid, "the label has %d bytes; at most %d are allowed", len(label), longestLabel)
	}
	if strings.ContainsFunc(label, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return "", fleet.Errorf(fleet.KindInvalid, "the label must not hold control characters")
	}
	return label, nil
}

func tokenOnWire(t fleet.Token, user string) *carrelv1.Token {
	return &carrelv1.Token{Id: t.ID, User: user, Label: t.Label, CreatedAt: stamp(t.CreatedAt), LastUsedAt: stamp(t.LastUsedAt), ExpiresAt: stamp(t.ExpiresAt)}
}

func keyOnWire(k fleet.DeviceKey, user string) *carrelv1.DeviceKey {
	return &carrelv1.DeviceKey{Id: k.ID, User: user, PublicKey: k.PublicKey, Fingerprint: k.Fingerprint, Label: k.Label, CreatedAt: stamp(k.CreatedAt)}
}
