package command

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"golang.org/x/crypto/ssh"

	"github.com/carrel-dev/carrel/cli/config"
	"github.com/carrel-dev/carrel/cli/wholefile"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

const maxLabel = 64 // characters, as SignInRequest.label

type loginOptions struct {
	link        string
	label       string
	noSSHConfig bool
	makeDefault bool
}

func newLogin(a *app) *cobra.Command {
	o := loginOptions{}
	cmd := &cobra.Command{
		Use:   "login LINK",
		Short: "Sign in with a one-time link; `-` reads it from stdin",
		Long: `Sign in with a one-time link (https://HOST:PORT/#sign-in=...) as an admin's ` + "`carrel user add`" + ` or ` + "`carrel user sign-in`" + ` prints it.
The link carries the fingerprint of the gateway's CA where that is its own; nothing is trusted that does not lead to it.
A key pair for ssh is made on this machine and registered, and the ssh configuration is set up.`,
		Example: `  carrel login 'https://gpu.example:7443/#sign-in=...'
  carrel login - < link.txt`,
		Args: exactArgs("LINK"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.link = args[0]
			return a.login(cmd.Context(), o)
		},
	}
	cmd.Flags().StringVar(&o.label, "label", "", "what the token is listed as (default: this machine's name)")
	cmd.Flags().BoolVar(&o.noSSHConfig, "no-ssh-config", false, "leave the ssh configuration alone")
	cmd.Flags().BoolVar(&o.makeDefault, "default", false, "make it the default deployment")
	return cmd
}

func (a *app) login(ctx context.Context, o loginOptions) error {
	if err := a.load(); err != nil {
		return err
	}
	link, err := a.readLink(o.link)
	if err != nil {
		return err
	}
	if o.label, err = label(o.label); err != nil {
		return err
	}
	if err := a.dir.Make(); err != nil {
		return err
	}
	dep, err := a.enter(ctx, link, o)
	if err != nil {
		return err
	}
	a.say("signed in at %s as %s (deployment %s)", dep.Gateway, dep.User, dep.Name)
	if o.noSSHConfig {
		return nil
	}
	return a.installSSH(ctx, dep)
}

// enter meets the gateway, signs in and keeps what it got, while no other carrel changes the same directory.
func (a *app) enter(ctx context.Context, link signInLink, o loginOptions) (config.Deployment, error) {
	unlock, err := wholefile.Lock(ctx, a.dir.Lock())
	if err != nil {
		return config.Deployment{}, err
	}
	defer unlock()
	dep, caPEM, err := a.meet(ctx, link)
	if err != nil {
		return dep, err
	}
	return a.signIn(ctx, dep, caPEM, link.code, o)
}

func (a *app) readLink(arg string) (signInLink, error) {
	if arg == "-" {
		line, err := readLine(a.sys.In)
		if err != nil {
			return signInLink{}, fmt.Errorf("read the link: %w", err)
		}
		arg = line
	}
	return parseLink(arg)
}

func label(given string) (string, error) {
	if given == "" {
		name, err := os.Hostname()
		if err != nil || name == "" {
			name = "carrel"
		}
		return clipTo(name, maxLabel), nil
	}
	if len(given) > maxLabel {
		return "", usagef("--label has %d characters; at most %d are allowed", len(given), maxLabel)
	}
	return given, nil
}

func clipTo(s string, n int) string {
	if len(s) > n {
		return s[:n]
	}
	return s
}

// meet finds out what stands at the link's address, and under which local name it is kept.
func (a *app) meet(ctx context.Context, link signInLink) (config.Deployment, []byte, error) {
	none := config.Deployment{}
	caPEM, err := a.pinnedCA(ctx, link)
	if err != nil {
		return none, nil, err
	}
	probe := config.Deployment{Name: "new", Gateway: link.gateway}
	api, err := a.newAPIWithCA(probe, caPEM)
	if err != nil {
		return none, nil, err
	}
	info, err := api.serverInfo(ctx)
	if err != nil {
		return none, nil, api.rpcError(ctx, err)
	}
	if older, known := newerVersion(info.GetMinClientVersion(), a.sys.Version); known && older {
		return none, nil, failf(exitFailure, "this carrel is too old for the gateway: gateway %s needs at least %s, this is %s", info.GetVersion(), info.GetMinClientVersion(), a.sys.Version)
	}
	name := a.flags.deployment
	if name == "" {
		name = info.GetDeployment()
	}
	if err := config.CheckDeploymentName(name); err != nil {
		return none, nil, usagef("%v; choose a local name with --deployment", err)
	}
	dep := a.dir.New(name, link.gateway)
	if old, err := a.dir.Load(name); err == nil {
		if old.Gateway != link.gateway && a.flags.deployment == "" {
			return none, nil, failf(exitConflict, "deployment %s is %s here already: choose another local name for %s with --deployment NAME, or `carrel logout --deployment %s` first", name, old.Gateway, link.gateway, name)
		}
		dep = old
		dep.Gateway = link.gateway
	}
	dep.CAFingerprint = link.fingerprint
	return dep, caPEM, nil
}

// signIn uses the code up. What can fail on this machine is tried before that.
func (a *app) signIn(ctx context.Context, dep config.Deployment, caPEM []byte, code string, o loginOptions) (config.Deployment, error) {
	oldToken, _ := dep.Token()
	oldUser := dep.User
	first, err := a.dir.Default() // as it was: a second deployment does not take its place
	if err != nil {
		return dep, err
	}
	public, private, err := newDeviceKey(o.label)
	if err != nil {
		return dep, err
	}
	if err := prepare(dep, caPEM, oldToken); err != nil {
		return dep, failf(exitFailure, "nothing was sent, the link stays good: %v", err)
	}
	api, err := a.newAPIWithCA(dep, caPEM)
	if err != nil {
		return dep, err
	}
	resp, err := api.auth.SignIn(ctx, connect.NewRequest(&carrelv1.SignInRequest{Code: code, Label: o.label}))
	if err != nil {
		return dep, linkRefused(err)
	}
	dep.User = resp.Msg.GetUser().GetName()
	if err := errors.Join(dep.SaveToken(resp.Msg.GetToken()), dep.Save()); err != nil {
		return dep, fmt.Errorf("signed in, but the token could not be kept: %w", err)
	}
	a.retire(ctx, dep, oldToken)
	if o.makeDefault || first == "" {
		first = dep.Name
	}
	if err := a.dir.New(first, "").SetDefault(); err != nil {
		return dep, err
	}
	return a.registerKey(ctx, dep, oldUser, public, private, o.label)
}

// prepare writes what is no secret, and so shows whether the directory can be written.
func prepare(dep config.Deployment, caPEM []byte, oldToken string) error {
	if err := dep.MakeDir(); err != nil {
		return err
	}
	if err := dep.SaveToken(oldToken); err != nil {
		return err
	}
	if caPEM != nil {
		return dep.SaveCA(caPEM)
	}
	return nil
}

func linkRefused(err error) error {
	var f *failure
	if errors.As(err, &f) && f.code == exitSignIn {
		return failf(exitSignIn, "the link was not taken: it is used up, expired or wrong; an admin makes another with `carrel user sign-in NAME`")
	}
	return err
}

// retire ends an earlier token of this machine; that it may fail costs only an entry in `carrel token ls`.
func (a *app) retire(ctx context.Context, dep config.Deployment, oldToken string) {
	if oldToken == "" {
		return
	}
	if api, err := a.newAPI(dep, oldToken, a.settings.Timeout); err == nil {
		_, _ = api.auth.SignOut(ctx, connect.NewRequest(&carrelv1.SignOutRequest{}))
	}
}

// registerKey makes sure that this machine has a key which the gateway knows. A key of an earlier login of the same
// person is kept.
func (a *app) registerKey(ctx context.Context, dep config.Deployment, oldUser string, public, private []byte, label string) (config.Deployment, error) {
	if kept := dep.PublicKey(); kept != "" && oldUser == dep.User {
		public = []byte(kept)
	} else if err := dep.SaveKey(private, public); err != nil {
		return dep, fmt.Errorf("signed in, but the ssh key could not be kept: %w", err)
	}
	token, err := dep.Token()
	if err != nil {
		return dep, err
	}
	api, err := a.newAPI(dep, token, a.settings.Timeout)
	if err != nil {
		return dep, err
	}
	resp, err := api.auth.AddDeviceKey(ctx, connect.NewRequest(&carrelv1.AddDeviceKeyRequest{PublicKey: keyOnly(public), Label: label}))
	if err != nil {
		return dep, fmt.Errorf("signed in, but the ssh key was not registered (try `carrel key add %s.pub`): %w", dep.KeyPath(), err)
	}
	dep.KeyID = resp.Msg.GetKey().GetId()
	return dep, dep.Save()
}

// keyOnly is type and base64 of an authorized_keys line.
func keyOnly(line []byte) string {
	fields := strings.Fields(string(line))
	return strings.Join(fields[:min(len(fields), 2)], " ")
}

// newDeviceKey makes an ed25519 key pair in OpenSSH's file forms.
func newDeviceKey(comment string) (public, private []byte, err error) {
	pub, priv, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	comment = "carrel:" + strings.Map(func(r rune) rune {
		if r <= ' ' || r >= 0x7f {
			return '-'
		}
		return r
	}, comment)
	block, err := ssh.MarshalPrivateKey(priv, comment)
	if err != nil {
		return nil, nil, err
	}
	sshPub, err := ssh.NewPublicKey(pub)
	if err != nil {
		return nil, nil, err
	}
	line := strings.TrimSpace(string(ssh.MarshalAuthorizedKey(sshPub))) + " " + comment + "\n"
	return []byte(line), pem.EncodeToMemory(block), nil
}
