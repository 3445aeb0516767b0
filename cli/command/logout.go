package command

import (
	"context"
	"errors"
	"fmt"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/config"
	"github.com/carrel-dev/carrel/cli/wholefile"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

func newLogout(a *app) *cobra.Command {
	var local bool
	cmd := &cobra.Command{
		Use:   "logout",
		Short: "Revoke this machine's token and ssh key, and remove them",
		Args:  exactArgs(),
		RunE:  func(cmd *cobra.Command, _ []string) error { return a.logout(cmd.Context(), local) },
	}
	cmd.Flags().BoolVar(&local, "local", false, "only remove the files here, without telling the gateway")
	return cmd
}

func (a *app) logout(ctx context.Context, local bool) error {
	dep, err := a.deployment()
	if err != nil {
		return err
	}
	if !dep.Stored() {
		return usagef("CARREL_TOKEN is in the environment, not in a file: unset it; `carrel token revoke` ends it")
	}
	if !local {
		if err := a.revokeOwn(ctx, dep); err != nil {
			return fmt.Errorf("%w; nothing was removed (--local removes the files without telling the gateway)", err)
		}
	}
	unlock, err := wholefile.Lock(ctx, a.dir.Lock())
	if err != nil {
		return err
	}
	defer unlock()
	if err := dep.Remove(); err != nil {
		return fmt.Errorf("remove the files of deployment %s: %w", dep.Name, err)
	}
	a.say("signed out of %s", dep.Gateway)
	_, err = a.writeSSH(ctx)
	return err
}

// revokeOwn ends key and token at the gateway. That they have ended already is as good.
func (a *app) revokeOwn(ctx context.Context, dep config.Deployment) error {
	token, err := dep.Token()
	if err != nil || token == "" {
		return err
	}
	api, err := a.newAPI(dep, token, a.settings.Timeout)
	if err != nil {
		return err
	}
	if dep.KeyID != "" {
		_, err := api.auth.RevokeDeviceKey(ctx, connect.NewRequest(&carrelv1.RevokeDeviceKeyRequest{Id: dep.KeyID}))
		if err != nil && !hasCode(err, exitNotFound) && !sessionEnded(err) {
			return err
		}
	}
	_, err = api.auth.SignOut(ctx, connect.NewRequest(&carrelv1.SignOutRequest{}))
	if sessionEnded(err) {
		return nil
	}
	return err
}

// sessionEnded reports whether a call was refused since its token is no longer good.
func sessionEnded(err error) bool {
	var f *failure
	return errors.As(err, &f) && f.ended
}

func hasCode(err error, codes ...int) bool {
	var f *failure
	if !errors.As(err, &f) {
		return false
	}
	for _, c := range codes {
		if f.code == c {
			return true
		}
	}
	return false
}
